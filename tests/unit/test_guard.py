"""What is said of a transfer outside the pool."""

import pickle

import pytest

from vllm_kvfix import guard


def test_the_error_tells_all_and_travels():
    """Ray pickles what a worker raises; the other executors send its text."""
    ids = list(range(6, 106))
    error = guard.PoolBoundsError(guard.LOAD, ids, 6, 3)
    for one in (error, pickle.loads(pickle.dumps(error))):
        assert isinstance(one, IndexError)
        assert (one.direction, one.ids, one.num_chunks, one.rank) == (("CPU", "GPU"), ids, 6, 3)
        assert str(one) == str(error)
    assert (
        "CPU to GPU, rank 3: chunk ids [6, 7, 8, 9, 10, 11, 12, 13] and 92 more are out of bounds for 6 chunks"
    ) in str(error)
    for what_to_report in ("Report this line", "'CPU pool of'", "the server's arguments", "vllm-kvfix 0.", "vLLM "):
        assert what_to_report in str(error)


def test_an_unknown_rank_is_not_named():
    error = guard.PoolBoundsError(guard.STORE, [6, 7], 6, None)
    assert str(error).startswith("GPU to CPU: chunk ids [6, 7] are out of bounds for 6 chunks; nothing was copied.")


def test_it_is_said_before_it_is_raised(caplog):
    with pytest.raises(IndexError, match="reason"):
        guard.refuse(IndexError("reason"))
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("ERROR", "vllm-kvfix: reason")]
