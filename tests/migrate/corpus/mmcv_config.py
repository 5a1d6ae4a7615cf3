# model settings come from elsewhere
optimizer = dict(type='SGD', lr=0.1)
optimizer_config = dict(grad_clip=dict(max_norm=35, norm_type=2))  # as in the paper
lr_config = dict(policy='step', step=[1])
# halves the memory
fp16 = dict(loss_scale=512.)
total_epochs = 2
