"""What the benchmark measures of stored receipts."""

from common.dev import bench


def test_what_is_stored_is_graded_and_published(tmp_path):
    stored = bench._stored(4, tmp_path)
    assert stored.count == 4
    assert stored.pages > 4
