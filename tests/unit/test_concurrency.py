"""Each KV cache group takes whole blocks of its own page size from one pool."""

import math

from hypothesis import given
from hypothesis import strategies as st

from vllm_kvfix import concurrency

GROUPS = st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(1, 1 << 24)), min_size=1, max_size=8)


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 24))
def test_a_block_that_is_filled_in_part_is_taken_whole(request_bytes, page):
    blocks = concurrency.blocks_per_request([(request_bytes, page)])
    assert (blocks - 1) * page < request_bytes <= blocks * page


@given(GROUPS, st.randoms())
def test_the_order_of_groups_does_not_matter(groups, random):
    shuffled = random.sample(groups, len(groups))
    assert concurrency.blocks_per_request(groups) == concurrency.blocks_per_request(shuffled)


@given(GROUPS, st.integers(1, 100))
def test_summing_pages_over_layers_does_not_matter(groups, layers):
    """A worker's group counts all its layers in bytes and page, the scheduler's one of them."""
    summed = [(request * layers, page * layers) for request, page in groups]
    assert concurrency.blocks_per_request(summed) == concurrency.blocks_per_request(groups)


@given(GROUPS, st.integers(0, 1 << 24))
def test_that_many_requests_fit_and_one_more_does_not(groups, num_blocks):
    needed = concurrency.blocks_per_request(groups)
    if needed == 0:
        return
    fit = math.floor(concurrency.max_concurrency(num_blocks, needed) + 1e-9)
    assert fit * needed <= num_blocks < (fit + 1) * needed


def test_nothing_to_hold_is_no_division_by_zero():
    assert concurrency.max_concurrency(100, concurrency.blocks_per_request([])) == 0.0
    assert concurrency.max_concurrency(100, concurrency.blocks_per_request([(0, 16), (5, 0)])) == 0.0


def test_pages_of_eight_to_two_hold_five_requests():
    """Stock vLLM to 0.26.0 says 8 or 2, by the order of the groups (vLLM #48317)."""
    groups = [(8000, 8), (2000, 2)]
    assert concurrency.max_concurrency(10_000, concurrency.blocks_per_request(groups)) == 5.0
