"""The pool's size keeps the operator's budget, whatever the geometry."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_kvfix import pool

GEOMETRY = {
    "rank_bytes": st.lists(st.integers(1, 1 << 24), min_size=1, max_size=16).map(tuple),
    "blocks_per_chunk": st.integers(1, 64),
    "alignment": st.sampled_from([1, 512, 4096]),
    "budget": st.integers(0, 1 << 42),
}


@given(**GEOMETRY)
def test_the_pool_never_exceeds_the_budget_and_wastes_less_than_a_row(rank_bytes, blocks_per_chunk, alignment, budget):
    row = pool.row_bytes(rank_bytes, blocks_per_chunk, alignment)
    used = pool.num_chunks(budget, row) * row
    assert used <= budget < used + row


@given(**GEOMETRY)
def test_a_row_holds_the_chunk_of_every_rank_and_less_than_one_alignment_more(
    rank_bytes, blocks_per_chunk, alignment, budget
):
    row = pool.row_bytes(rank_bytes, blocks_per_chunk, alignment)
    needed = sum(rank * blocks_per_chunk for rank in rank_bytes)
    assert row % alignment == 0
    assert needed <= row < needed + alignment


@given(**GEOMETRY)
def test_every_rank_has_a_slot_of_its_own_in_the_row_and_whole_words_begin_at_a_word(
    rank_bytes, blocks_per_chunk, alignment, budget
):
    sizes = [rank * blocks_per_chunk for rank in rank_bytes]
    slots = sorted(zip(pool.slots(rank_bytes, blocks_per_chunk), sizes))
    ends = [offset + size for offset, size in slots]
    assert [offset for offset, _ in slots] == [0, *ends[:-1]], "side by side, in some order"
    assert ends[-1] <= pool.row_bytes(rank_bytes, blocks_per_chunk, alignment)
    assert sorted(size for _, size in slots) == sorted(sizes)
    assert all(offset % 8 == 0 for offset, size in slots if size % 8 == 0)


def test_the_slot_of_each_rank_is_that_of_its_own_bytes():
    assert pool.slots((64, 192, 32), 2) == (0, 128, 512)
    assert pool.slots((5, 64, 3, 32), 1) == (96, 0, 101, 64)


def test_no_blocks_and_no_bytes_give_no_chunks():
    assert pool.bytes_per_block(0, 0) == pool.bytes_per_block(0, 5) == pool.bytes_per_block(5, 0) == 0
    assert pool.num_chunks(1 << 30, pool.row_bytes((0, 0), 4, 4096)) == 0


def test_a_reported_model_gets_one_number_where_stock_gave_two():
    """https://github.com/vllm-project/vllm/issues/42348: 60 layers, 4 ranks, 32 GiB."""
    layers = [65536] * 50 + [32768] * 10
    budget = 32 << 30
    own = pool.bytes_per_block(1000 * sum(layers), 1000)
    assert pool.num_chunks(budget, pool.row_bytes((own,) * 4, 1)) == 2383
    assert pool.stock_num_chunks(budget, layers[0], len(layers), 4, 1) == 2184
    assert pool.stock_num_chunks(budget, sum(layers), len(layers), 4, 1) == 39


def test_ranks_of_different_size_share_one_number():
    """Pipeline stages of one and of three layers, 4 MB: 15 rows, 3,932,160 bytes."""
    row = pool.row_bytes((65536, 196608), 1)
    assert (pool.num_chunks(4_000_000, row), pool.num_chunks(4_000_000, row) * row) == (15, 3_932_160)
