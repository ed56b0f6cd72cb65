"""StepMemory counts storages, not tensors: allocation, views, in-place results, death."""

import torch

from shardwright.runtime.tracker import StepMemory, held_tensors

KIB = 1024


def test_temporaries_count_while_they_live() -> None:
    x = torch.ones(256)
    with StepMemory([x]) as memory:
        y = x.relu()
        z = y.neg()
        del y
        assert memory.current_bytes == 2 * KIB
        z = z.exp()
    assert memory.peak_bytes == 3 * KIB
    assert memory.current_bytes == 2 * KIB
    del z
    assert memory.current_bytes == KIB


def test_views_and_in_place_results_allocate_nothing() -> None:
    x = torch.ones(256)
    with StepMemory([x]) as memory:
        kept = [x.view(16, 16), x[:4], x.add_(1), x.detach()]
    assert len(kept) == 4
    assert memory.peak_bytes == KIB


def test_a_buffer_that_existed_before_is_not_counted_when_written() -> None:
    pool, x = torch.empty(256), torch.ones(256)
    with StepMemory([x]) as memory:
        pool.copy_(x)
    assert memory.peak_bytes == KIB


def test_storages_round_up_to_the_block() -> None:
    with StepMemory(block_bytes=512) as memory:
        x = torch.ones(129)
    assert x.numel() == 129
    assert memory.peak_bytes == 1024


def test_a_training_step_peaks_at_weights_state_gradients_and_saved_activations() -> None:
    """One square linear layer without bias: everything is a multiple of one 4 KiB matrix."""
    layer = torch.nn.Linear(32, 32, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    batch = torch.ones(32, 32)

    def step() -> None:
        layer(batch).relu().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with StepMemory([*held_tensors(layer, optimizer), batch]) as memory:
        at_rest = memory.current_bytes
        step()
    assert at_rest == 3 * 4 * KIB
    assert memory.current_bytes == at_rest
    saved_and_its_gradient, scalars = 2 * 4 * KIB, 2 * 64
    assert memory.peak_bytes == at_rest + saved_and_its_gradient + scalars
