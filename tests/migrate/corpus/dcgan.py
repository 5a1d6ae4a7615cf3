import argparse

import torch
import torch.nn as nn

from apex import amp

parser = argparse.ArgumentParser()
parser.add_argument('--opt_level', default='O1', help='amp opt_level, default="O1"')
opt = parser.parse_args()
torch.manual_seed(0)
nz, real_label, fake_label = 6, 1, 0
losses = []

netG = nn.Sequential(nn.Linear(nz, 32), nn.BatchNorm1d(32), nn.ReLU(True), nn.Linear(32, 12), nn.Tanh())
netD = nn.Sequential(nn.Linear(12, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=0.002, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=0.002, betas=(0.5, 0.999))

[netD, netG], [optimizerD, optimizerG] = amp.initialize(
    [netD, netG], [optimizerD, optimizerG], opt_level=opt.opt_level, num_losses=3, verbosity=0)

for i in range(8):
	############################
	# (1) Update D network: maximize log(D(x)) + log(1 - D(G(z)))
	###########################
	# train with real
	netD.zero_grad()
	real_cpu = torch.randn(10, 12).to('cpu')
	batch_size = real_cpu.size(0)
	label = torch.full((batch_size,), float(real_label))

	output = netD(real_cpu).view(-1)
	errD_real = criterion(output, label) * 500
	with amp.scale_loss(errD_real, optimizerD, loss_id=0) as errD_real_scaled:
		errD_real_scaled.backward()
	D_x = output.mean().item()

	# train with fake
	noise = torch.randn(batch_size, nz)
	fake = netG(noise)
	label.fill_(fake_label)
	output = netD(fake.detach()).view(-1)
	errD_fake = criterion(output, label)
	with amp.scale_loss(errD_fake, optimizerD, loss_id=1) as errD_fake_scaled:
		errD_fake_scaled.backward()
	errD = errD_real + errD_fake
	optimizerD.step()

	############################
	# (2) Update G network: maximize log(D(G(z)))
	###########################
	netG.zero_grad()
	label.fill_(real_label)  # fake labels are real for generator cost
	output = netD(fake).view(-1)
	errG = criterion(output, label)
	with amp.scale_loss(errG, optimizerG, loss_id=2) as errG_scaled:
		errG_scaled.backward()
	optimizerG.step()
	losses += [errD.detach().clone(), errG.detach().clone()]
