"""What is wrong with the files that a run is given: configs, rollouts, tokenizers."""

from __future__ import annotations

import json
from functools import partial

from tests.faults.acts import send_sigterm
from tests.faults.kinds import Case, Kind, at
from tests.faults.places import CONFIG, Place, write_rollouts


def _config(place: Place, content: bytes | None) -> None:
    place.config = place.folder / "run.yaml"
    if content is not None:
        place.config.write_bytes(content)
    place.is_refused(place.train())
    assert not place.run.exists()


def _config_of_the_run(place: Place, content: bytes | None) -> None:
    place.take_stopped_run()
    file = place.run / "config.yaml"
    before = file.read_bytes()
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    place.is_refused(place.train(resume=True))
    file.write_bytes(before)
    place.goes_on()


def _rollouts(place: Place, content: bytes | None) -> None:
    file = place.own_rollouts()
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    place.is_refused(place.train(), file.name)
    assert not place.run.exists()


def _changed_rollouts(place: Place, seed: int, num_groups: int) -> None:
    file = place.own_rollouts()
    assert place.train(at("step", 4, send_sigterm)).codes == [143]
    before = file.read_bytes()
    write_rollouts(file, seed=seed, num_groups=num_groups)
    ended = place.train(resume=True)
    place.is_refused(ended)
    file.write_bytes(before)
    place.goes_on()


def _tokenizer(place: Place, content: bytes | None) -> None:
    file = place.folder / "tokenizer.json"
    if content is not None:
        file.write_bytes(content)
    text = CONFIG.format(rollouts=place.shared.rollouts)
    lines = [line for line in text.splitlines() if not line.startswith("tokenizer:")]
    lines.append(f"tokenizer: {{type: file, path: {file}, end_token: '</s>'}}")
    place.config = place.folder / "run.yaml"
    place.config.write_text("\n".join(lines), encoding="utf-8")
    place.is_refused(place.train())
    assert not place.run.exists()


def _record(**changes: object) -> bytes:
    record = {"prompt_ids": [1, 2], "completion_ids": [3, 4], "group_id": 0, "reward": 1.0}
    record |= {"logprobs": [-1.0, -2.0]} | changes
    return json.dumps(record).encode() + b"\n"


CONFIGS = {
    "empty": b"",
    "bytes": bytes(range(256)),
    "utf-16": "seed: 3".encode("utf-16"),
    "no mapping": b"- 1\n- 2\n",
    "unknown key": b"sed: 3\n",
    "tag": b"seed: !!python/object/apply:os.system ['touch x']\n",
    "deep": b"a: " + b"[" * 5000,
    "cut": CONFIG.encode()[:400],
    "missing": None,
}

ROLLOUTS = {
    "empty": b"",
    "bytes": bytes(range(256)),
    "cut": _record()[:40],
    "no reward column": json.dumps({"prompt_ids": [1], "completion_ids": [2]}).encode(),
    "text": _record(reward="high"),
    "NaN": _record(reward=float("nan")),
    "token": _record(completion_ids=[3, 10**9]),
    "length": _record(logprobs=[-1.0]),
    "missing": None,
}

ONE = "2 and one message; nothing is written"

KINDS = [
    Kind(
        "a config that cannot be read",
        ONE,
        "nothing",
        [Case(1, partial(_config, content=content)) for content in CONFIGS.values()]
        + [Case(2, partial(_config, content=CONFIGS["unknown key"]))],
    ),
    Kind(
        "the config in the run folder is damaged or missing",
        "2 and one message",
        "nothing, once it is right",
        [
            Case(1, partial(_config_of_the_run, content=CONFIGS[name]))
            for name in ("empty", "bytes", "cut", "missing")
        ],
    ),
    Kind(
        "a rollout file that cannot be read",
        ONE,
        "nothing",
        [Case(1, partial(_rollouts, content=content)) for content in ROLLOUTS.values()]
        + [Case(2, partial(_rollouts, content=ROLLOUTS["cut"]))],
    ),
    Kind(
        "a rollout file that is another when the run goes on",
        "2 and one message",
        "nothing, once it is right",
        [
            Case(1, partial(_changed_rollouts, seed=seed, num_groups=num_groups))
            for seed, num_groups in ((1, 6), (0, 5), (0, 50), (0, 1))
        ],
    ),
    Kind(
        "a tokenizer that cannot be read",
        ONE,
        "nothing",
        [
            Case(1, partial(_tokenizer, content=content))
            for content in (b"", b"{}", b"[]", bytes(range(256)), b'{"model": 3}', None)
        ],
    ),
]
