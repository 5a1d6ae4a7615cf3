optimizer = dict(type='AdamW', lr=1e-3)
optim_wrapper = dict(
    type='ApexOptimWrapper',
    opt_level='O1',
    optimizer=optimizer)
