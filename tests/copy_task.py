"""A small model that learns to say again what it has read, by its losses."""

import torch

from glabench.models import LanguageModel, ModelConfig

VOCABULARY, HALF, BATCH, WIDTH = 8, 4, 16, 64
SIZES = {"heads": 2, "key_dim": 16, "value_dim": 32}
# Slow enough that training is not chaotic: at 1e-3, models in float64 that differ by 1e-16 end 2 % apart.
RATE, WARM_UP, MOST_NORM = 3e-4, 20, 1.0


def copying_model(mixer, kernel, registry):
    """Two layers, from the same parameters for every kernel."""
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(mixer, WIDTH, 2, VOCABULARY, kernel, SIZES), registry)


def copying(seed, half=HALF):
    """Rows that say the same twice, and targets that count in the second half alone."""
    said = torch.randint(VOCABULARY, (BATCH, half), generator=torch.Generator().manual_seed(seed))
    row = torch.cat((said, said), dim=1)
    targets = row[:, 1:].clone()
    targets[:, : half - 1] = -100
    return row[:, :-1], targets


def losses_of(model, steps, device="cpu", half=HALF):
    """The losses of so many steps of AdamW, with warm-up and clipping."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / WARM_UP)
        loss = model.loss(*(x.to(device) for x in copying(step, half)))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MOST_NORM)
        optimizer.step()
        losses.append(loss.item())
    return losses
