"""The same step with a CUDA device: every path that a chunk can take between HBM, pinned memory and files."""

from __future__ import annotations

import pytest
import torch
from optim.rig import SHAPES, everywhere, file_store, mixed, random_grads, rig

from infinity.kinds import Group, Lane, State, Tier

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

STATES = (State.PARAM, State.MASTER, State.EXP_AVG, State.EXP_AVG_SQ)


def all_three(chunk, group):
    """Every combination of homes, over the chunks."""
    return list(Tier)[(chunk.unit + chunk.index * {Group.PARAM: 1, Group.GRAD: 2, Group.OPTIMIZER: 4}[group] + len(group)) % 3]


PLACEMENTS = {
    **{tier.value: everywhere(tier) for tier in Tier},
    "cpu and nvme": mixed,
    "all three": all_three,
    "states in hbm, params on nvme": lambda chunk, group: Tier.HBM if group is Group.OPTIMIZER else Tier.NVME,
    "params in hbm, states on nvme": lambda chunk, group: Tier.NVME if group is Group.OPTIMIZER else Tier.HBM,
}


def run_three_steps(place, dtype: torch.dtype, device: torch.device, tmp_path) -> tuple[dict[State, dict[str, torch.Tensor]], list[float]]:
    tmp_path.mkdir()
    norms = []
    with file_store(tmp_path, device) as open_store, rig(place, dtype=dtype, grad_dtype=torch.float32, open_store=open_store, device=device) as r:
        optimizer = r.optimizer(lr=1e-2)
        for step in range(3):
            for micro in range(2):
                r.backward(random_grads(SHAPES, dtype, 10 * step + micro, missing=["0.bias"] if step == 1 else []))
            norms.append(float(optimizer.clip_grad_norm_(1.0)))
            optimizer.step()
        torch.cuda.synchronize()
        return {state: r.values(state) for state in STATES}, norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", PLACEMENTS.values(), ids=PLACEMENTS)
def test_every_placement_computes_what_the_cpu_computes_to_the_bit(place, dtype: torch.dtype, tmp_path):
    expected, expected_norms = run_three_steps(everywhere(Tier.CPU), dtype, torch.device("cpu"), tmp_path / "cpu")
    got, norms = run_three_steps(place, dtype, torch.device("cuda"), tmp_path / "cuda")
    assert norms == pytest.approx(expected_norms, rel=2e-7)  # summed in fp64 in another order, rounded to fp32
    for state in STATES:
        assert all(torch.equal(got[state][name], value) for name, value in expected[state].items()), state


def test_a_gradient_comes_down_after_the_kernel_that_computes_it_and_not_later():
    """The download waits for the gradient alone, not for compute that was queued behind it."""
    with rig(everywhere(Tier.CPU), dtype=torch.bfloat16, device=torch.device("cuda")) as r:
        grad = torch.zeros(r.units[1].flats[0].numel, dtype=torch.bfloat16, device="cuda")
        torch.cuda._sleep(20_000_000)
        grad += 3
        r.grads.arrive(1, 0, grad, frozenset({0, 1, 2, 3}))
        torch.cuda._sleep(4_000_000_000)
        r.grads.wait()
        assert not torch.cuda.current_stream().query()
        chunk = next(chunk for chunk in r.chunks if chunk.unit == 1)
        assert torch.equal(r.state_of(chunk, State.GRAD), torch.full((2048,), 3.0, dtype=torch.bfloat16))
        torch.cuda.synchronize()
        assert any(span.lane is Lane.DOWNLOAD for span in r.timeline.spans())
