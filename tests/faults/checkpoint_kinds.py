"""What happens to checkpoints and logs of a run that has been stopped, before it goes on."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.faults.kinds import Case, Kind
from tests.faults.places import Place

FILES = (
    "config.json",
    "generation_config.json",
    "manifest.json",
    "model.safetensors",
    "tokenizer.json",
    "trainer/optimizer.safetensors",
    "trainer/progress.json",
)


def _one_byte(file: Path, seed: int) -> None:
    content = bytearray(file.read_bytes())
    content[random.Random(seed).randrange(len(content))] ^= 0x10
    file.write_bytes(content)


def _cut(file: Path, seed: int) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: random.Random(seed).randrange(len(content))])


def _zeros(file: Path, seed: int) -> None:
    content = file.read_bytes()
    start = random.Random(seed).randrange(len(content) // 2)
    file.write_bytes(content[:start] + bytes(len(content) - start))


def _longer(file: Path, seed: int) -> None:
    file.write_bytes(file.read_bytes() + random.Random(seed).randbytes(16))


def _gone(file: Path, seed: int) -> None:
    file.unlink()


def _damaged(place: Place, name: str, damage: Callable[[Path, int], None], seed: int) -> None:
    place.take_stopped_run()
    damage(place.checkpoint / name, seed)
    _follows_the_offer(place)


def _surplus(place: Place, name: str) -> None:
    place.take_stopped_run()
    (place.checkpoint / name).write_bytes(b"x")
    _follows_the_offer(place)


def _follows_the_offer(place: Place) -> None:
    """The checkpoint is refused, and the run goes on from the one that the message names."""
    ended = place.train(resume=True)
    place.is_refused(ended, "the latest checkpoint cannot be used")
    offer = re.search(r"(\S+) before it is whole", ended.err)
    assert offer is not None, ended.err
    place.checkpoint.rename(place.folder / "damaged")
    (place.run / "checkpoints" / "latest").write_text(f"{offer[1]}\n", encoding="utf-8")
    place.goes_on()


def _latest(place: Place, content: bytes) -> None:
    place.take_stopped_run()
    latest = place.run / "checkpoints" / "latest"
    before = latest.read_bytes()
    latest.write_bytes(content)
    place.is_refused(place.train(resume=True))
    latest.write_bytes(before)
    place.goes_on()


def _foreign(place: Place, name: str) -> None:
    place.take_stopped_run()
    folder = place.run / "checkpoints" / name
    folder.mkdir()
    (folder / "file").write_bytes(b"x")
    place.goes_on()
    assert folder.exists() != name.startswith(".second")


def _torn(place: Place, tail: bytes) -> None:
    """A metrics file whose end is not a record, as a kill or a full disk leaves it."""
    place.take_stopped_run()
    with (place.run / "metrics.jsonl").open("ab") as file:
        file.write(tail)
    place.goes_on()


def _damages(damage: Callable[[Path, int], None], num_seeds: int = 1) -> list[Case]:
    return [
        Case(1, partial(_damaged, name=name, damage=damage, seed=seed))
        for name in FILES
        for seed in range(num_seeds)
    ]


REFUSED = "2 and one message, which names the file and the checkpoint before that is whole"
BEFORE = "the steps after the checkpoint before"

KINDS = [
    Kind("one byte of a checkpoint's file is changed", REFUSED, BEFORE, _damages(_one_byte, 4)),
    Kind("a checkpoint's file is cut", REFUSED, BEFORE, _damages(_cut, 2)),
    Kind("a checkpoint's file ends in zeros", REFUSED, BEFORE, _damages(_zeros, 2)),
    Kind("a checkpoint's file is longer", REFUSED, BEFORE, _damages(_longer)),
    Kind("a checkpoint's file is missing", REFUSED, BEFORE, _damages(_gone)),
    Kind(
        "a checkpoint has a file more",
        REFUSED,
        BEFORE,
        [Case(1, partial(_surplus, name=name)) for name in ("x.safetensors", "trainer/x.pt")],
    ),
    Kind(
        "`latest` names no checkpoint of the run",
        "2 and one message",
        "nothing, once it is right",
        [
            Case(1, partial(_latest, content=content))
            for content in (b"", b"../../x", b"/tmp", b"\xff\xfe", b"best\n", b"second-000004\n")
        ],
    ),
    Kind(
        "folders that are not the run's beside its checkpoints, or that it left half-written",
        "0; the first are left alone, the others removed",
        "nothing",
        [
            Case(1, partial(_foreign, name=name))
            for name in ("best", "mine-000003", ".second-000006.partial", ".ipynb_checkpoints")
        ],
    ),
    Kind(
        "the metrics end in something that is no record",
        "0; it is dropped",
        "nothing",
        [
            Case(1, partial(_torn, tail=tail))
            for tail in (b'{"step": 6, "ph', b"\n", b"\xff\xfe\n", b"{}\n", b"null\n", b"\0" * 64)
        ],
    ),
]
