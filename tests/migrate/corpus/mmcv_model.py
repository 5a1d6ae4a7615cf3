import torch
from mmcv.runner import (BaseModule, EpochBasedRunner, Fp16OptimizerHook, auto_fp16,
                         force_fp32)
from mmcv.runner.fp16_utils import wrap_fp16_model
from mmcv.utils import Registry, get_logger
import mmcv.runner as mr

MODELS = Registry('model')


@MODELS.register_module()
class Net(BaseModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 2)
        self.fp16_enabled = False

    @auto_fp16(apply_to=('x', ))
    def forward(self, x):
        return self.net(x)

    @force_fp32(apply_to=('y', ))
    def loss(self, y):
        return y.square().mean()

    def train_step(self, data, optimizer):
        loss = self.loss(self(data))
        losses.append(loss.detach().clone())
        return dict(loss=loss, log_vars=dict(), num_samples=len(data))


torch.manual_seed(0)
losses = []
model = MODELS.build(dict(type='Net'))
wrap_fp16_model(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
runner = EpochBasedRunner(model, optimizer=optimizer, max_epochs=2,
                          logger=get_logger('net'))
runner.register_hook(Fp16OptimizerHook(loss_scale=512.))
assert mr.get_dist_info() == (0, 1)
runner.run([[torch.randn(4, 8) for _ in range(3)]], [('train', 1)])
