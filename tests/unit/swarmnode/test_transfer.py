"""How far a download is, in words: what was there before is not counted as speed, and events are few."""

import trio
import trio.testing

from peers.chunk_exchange import TransferProgress
from swarmnode.runtime.transfer import TELL_EVERY_S, FileProgress, Transfer


def at(done_mb: int, total_mb: int = 200) -> TransferProgress:
    return TransferProgress(done_mb, total_mb, done_mb * 1_000_000, total_mb * 1_000_000)


async def test_the_rate_is_of_what_came_now(autojump_clock: trio.testing.MockClock) -> None:
    transfer = Transfer("snapshot of version 7", 200_000_000, 150_000_000)
    assert str(transfer) == "snapshot of version 7: 75 % of 200.0 MB, 0.0 MB/s"
    transfer.note(at(160))
    for done in (162, 164, 166, 168):
        await trio.sleep(1)
        transfer.note(at(done))
    # Four times two megabytes; the window opens at the first of them.
    assert str(transfer) == "snapshot of version 7: 84 % of 200.0 MB, 2.7 MB/s"


async def test_files_of_a_model_are_told_of_now_and_then(autojump_clock: trio.testing.MockClock) -> None:
    told: list[str] = []
    progress = FileProgress(lambda level, text: told.append(text))
    progress.note("config.json", at(1, 1))
    for done in range(0, 200, 2):
        progress.note("model.safetensors", at(done))
        await trio.sleep(TELL_EVERY_S / 20)
    assert [text.split(",")[0] for text in told] == [
        f"fetching model.safetensors: {share} % of 200.0 MB" for share in (20, 40, 60, 80)
    ]
