"""What a resume compares: the files that a run read, by what they hold, and the versions that it computed with."""

import json
import os
import re
import shutil
from contextlib import closing
from dataclasses import replace

import msgspec
import pytest
from place import EXAMPLE, MINE
from saved_checkpoints import save

from msrl_graph import compile
from msrl_graph.cli import run_main
from msrl_graph.diagnostics import NOWHERE
from msrl_graph.files import urls
from msrl_graph.ir.evaluation import Evaluation
from msrl_graph.ir.run_options import RunOptions
from msrl_graph.runtime.driver import run_inputs, supervisor
from msrl_graph.runtime.driver.resume import find_resume_point
from msrl_graph.runtime.driver.run_inputs import DigestThread, collect_inputs, differences
from msrl_graph.runtime.metrics.recorder import Recorder
from msrl_graph.runtime.process import host_facts


def project(folder):
    """The example with a function of its own in a folder; its program."""
    folder.mkdir(exist_ok=True)
    shutil.copytree(EXAMPLE / "model", folder / "model")
    for name in ("train.jsonl", "test.jsonl"):
        shutil.copy(EXAMPLE / name, folder)
    helper = "from helper import WORTH\n\n\ndef score(response: str, answer: str) -> float:\n    return WORTH\n"
    (folder / "mine.py").write_text(helper)
    (folder / "helper.py").write_text("WORTH = 1.0\n")
    text = (EXAMPLE / "grpo.rlg").read_text().replace(*MINE)
    (folder / "p.rlg").write_text(text)
    return folder / "p.rlg"


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return project(tmp_path)


def written(path, old, new):
    text = path.read_text()
    assert old in text, path
    path.write_text(text.replace(old, new))


def stated(path, **values):
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | values))


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


# What is done to a project, and what a resume says of it then: of another model, and of what else has changed.
CHANGES = {
    "weights": (
        lambda f: flip(f / "model" / "model.safetensors", -1),
        [r"model policy: model.safetensors has other content \([\d,]+ bytes as before\)"],
        [],
    ),
    "weights that are not read": (
        lambda f: shutil.copy(f / "model" / "model.safetensors", f / "model" / "more.safetensors"),
        [],
        [],
    ),
    "rope_theta": (
        lambda f: stated(f / "model" / "config.json", rope_theta=500000.0),
        [r"model policy: config.json: rope_theta was \S+, is 500000.0"],
        [],
    ),
    "a longer value": (
        lambda f: stated(f / "model" / "config.json", rope_scaling={"rope_type": "yarn", "more": "x" * 60}),
        ["model policy: config.json: rope_scaling has another value"],
        [],
    ),
    "tokenizer": (
        lambda f: stated(f / "model" / "tokenizer.json", truncation={"max_length": 4}),
        [r"model policy: tokenizer.json: truncation was null, is \{\"max_length\": 4\}"],
        [],
    ),
    "chat template": (
        lambda f: (f / "model" / "chat_template.jinja").write_text("{{ messages }}"),
        [],
        ["model policy: chat_template.jinja is new"],
    ),
    "chat template in the tokenizer's config": (
        lambda f: stated(f / "model" / "tokenizer_config.json", chat_template="{{ messages }}"),
        [],
        [r"model policy: tokenizer_config.json: chat_template was nothing, is \"{{ messages }}\""],
    ),
    "generation config": (
        lambda f: stated(f / "model" / "generation_config.json", temperature=0.1),
        [],
        ["model policy: generation_config.json: temperature was nothing, is 0.1"],
    ),
    "data": (
        lambda f: written(f / "train.jsonl", "1", "2"),
        [],
        [r"data source has other content \([\d,]+ bytes as before\)"],
    ),
    "code that a function imports": (
        lambda f: (f / "helper.py").write_text("WORTH = 7.0\n"),
        [],
        [r"code helper.py has other content \(12 bytes as before\)"],
    ),
    "code that is gone": (
        lambda f: written(f / "mine.py", "from helper import WORTH", "WORTH = 1.0"),
        [],
        ["code helper.py is gone", r"code mine.py has other content \(.*\)"],
    ),
    # What decides nothing.
    "the config written otherwise": (
        lambda f: stated(f / "model" / "config.json", transformers_version="9.9", _name_or_path="elsewhere"),
        [],
        [],
    ),
    "a card": (lambda f: (f / "model" / "README.md").write_text("hello"), [], []),
    "times": (lambda f: [p.touch() for p in f.rglob("*")], [], []),
}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """A plan, the folder of its files, and its inputs."""
    program = project(tmp_path_factory.mktemp("pristine") / "work")
    plan = compile(program)
    shutil.copytree(program.parent, program.parent.with_name("copy"))
    return plan, program.parent, collect_inputs(plan)


@pytest.mark.parametrize("what", CHANGES)
def test_what_has_changed_is_named(pristine, what):
    change, model, changed = CHANGES[what]
    plan, folder, before = pristine
    change(folder)
    found = differences(before, collect_inputs(plan))
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name("copy"), folder)
    for told, wanted in ((found.model, model), (found.changed, changed)):
        assert len(told) == len(wanted), found
        for words, pattern in zip(told, wanted, strict=True):
            assert re.fullmatch(pattern, words), words


def test_a_project_that_was_moved_is_the_same(tmp_path):
    plans = []
    for name in ("here", "there"):
        plans.append(compile(project(tmp_path / name)))
    assert differences(*map(collect_inputs, plans)) == run_inputs.Differences()


def test_copies_of_what_lies_at_urls_are_compared_by_what_they_hold(program, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    local = collect_inputs(compile(program))
    for name in ("./model", "train.jsonl", "test.jsonl"):
        written(program, f'"{name}"', f'"file://{tmp_path / name.removeprefix("./")}"')
    made = supervisor.prepare(compile(program))
    assert urls.is_url(made.plan.deploy.models["policy"].path)
    assert differences(local, made.inputs) == run_inputs.Differences()


def test_versions_that_differ_are_listed(program):
    before = collect_inputs(compile(program))
    assert {"Python", "msrl-graph", "torch", "numpy", "transformers"} <= before.versions.keys()
    now = replace(before, versions=before.versions | {"torch": "9.9", "flash-attn": "3.0"})
    has = before.versions["torch"]
    assert differences(before, now).changed == (f"torch was {has}, is 9.9", "flash-attn was not used, is 3.0")


# A resume


@pytest.fixture
def ran(program):
    """A checkpoint of a run of the program, in `ran`."""
    plan = compile(program)
    kept = msgspec.to_builtins(collect_inputs(plan))
    return save(program.parent / "ran", plan, 2, written={"inputs": kept})


def test_another_model_is_refused(program, ran, capsys):
    stated(program.parent / "model" / "config.json", rope_theta=500000.0)
    assert run_main(["p.rlg", "--resume", "ran", "--dry-run"]) == 1
    said = capsys.readouterr().err
    assert (
        f"error[bad-checkpoint]: the checkpoint {ran} is of another model: model policy: config.json: rope_theta"
        in said
    )
    assert "= help: restore what the run began with, or start another run, without --resume\n" in said


def test_all_else_is_listed_in_one_warning_and_in_the_dry_run(program, ran, capsys):
    assert run_main(["p.rlg", "--resume", "ran", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert "changed-program" not in err and "changed since" not in out
    written(program.parent / "train.jsonl", "1", "2")
    (program.parent / "helper.py").write_text("WORTH = 7.0\n")
    assert run_main(["p.rlg", "--resume", "ran", "--dry-run", "--set", "kl_coef=0.5"]) == 0
    out, err = capsys.readouterr()
    changed = find_resume_point(
        compile("p.rlg", sets={"kl_coef": 0.5}), "ran", NOWHERE, collect_inputs(compile("p.rlg"))
    ).changed
    named = [what.partition(" was ")[0].partition(" has other ")[0] for what in changed]
    assert named[0] == "algorithm.params.kl_coef" and named[-2:] == ["data source", "code helper.py"]
    assert err.count("warning[") == err.count("warning[changed-program]") == 1
    assert f"have changed since the checkpoint {ran} was written: {'; '.join(changed)}\n" in err
    assert [line for line in out.splitlines() if line.startswith("changed")] == [
        f"changed since the checkpoint: {what}" for what in changed
    ]


def test_a_checkpoint_that_kept_no_digests_is_compared_by_sizes(program, tmp_path):
    path = save(tmp_path / "old", compile(program), 2)
    assert find_resume_point(compile(program), str(path), NOWHERE, collect_inputs(compile(program))).changed == ()
    (tmp_path / "train.jsonl").write_text((tmp_path / "train.jsonl").read_text() + "\n")
    (told,) = find_resume_point(compile(program), str(path), NOWHERE, collect_inputs(compile(program))).changed
    assert told.startswith("data.source.bytes was ")


def test_the_next_line_of_metrics_lists_it(program, tmp_path):
    with closing(Recorder(tmp_path, compile(program), 0, ["data source has other content"])) as recorder:
        recorder.evaluation(Evaluation("test", 0, ("reward",), 1, 0.0), 0, 0.5, [], {})
        for i in range(2):
            recorder.training(i, 0.5, [], {}, 0)
        recorder.lines.clear()  # no curve
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("changed") for line in lines] == [None, ["data source has other content"], None]


# While a run is on


def test_a_run_that_starts_anew_does_not_read_other_data(program, tmp_path):
    """Its driver dies, and meanwhile the data were changed."""
    made = supervisor.prepare(compile(program), RunOptions("out"))
    dies = "import os; open('train.jsonl', 'a').write('\\n'); os._exit(1)"
    with pytest.raises(supervisor.RunFailed) as failed:
        supervisor.Supervisor(made, None, ("-c", dies)).run()
    assert str(failed.value) == (
        f"the driver ended with status 1, and data source ({tmp_path}/train.jsonl) was changed after the run began: "
        "the run cannot continue as it began; the files of the run so far are in out"
    )
    kept = run_inputs.parse_inputs(run_inputs.read(tmp_path / "out"))
    assert kept.files.keys() == made.inputs.files.keys() and differences(kept, made.inputs) == run_inputs.Differences()
    assert all(entry.sha256 for name, entry in kept.files.items() if name.startswith("code "))


# Large files


def large(path, changed_at=None):
    content = bytearray(b"0123456789abcdef" * (3 * host_facts.SAMPLED // 16))
    if changed_at is not None:
        content[changed_at] ^= 1
    path.write_bytes(content)
    return path


def test_samples_of_a_large_file_are_of_its_size_its_ends_and_between(tmp_path):
    path = large(tmp_path / "data")
    whole = host_facts.sampled_digest(str(path))
    last = 3 * host_facts.SAMPLED - 1
    blocks = [(last + 1 - host_facts.BLOCK) * i // 15 for i in range(16)]
    for place in (0, last, blocks[7], blocks[7] + host_facts.BLOCK - 1):
        assert host_facts.sampled_digest(str(large(path, place))) != whole, place
    assert host_facts.sampled_digest(str(large(path, blocks[7] + host_facts.BLOCK))) == whole
    path.write_bytes(path.read_bytes() + b"0")
    assert host_facts.sampled_digest(str(path)) != whole


def test_a_pipe_in_a_models_folder_holds_nobody(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    assert run_inputs._read_file(tmp_path / "model.safetensors").bytes == -1
    found = host_facts._sampled_digests([str(tmp_path / "model.safetensors"), str(tmp_path / "none")])
    assert [*found.values()] == ["", ""]


def test_what_the_samples_do_not_show_is_reported_when_the_file_is_digested_whole(tmp_path):
    path = large(tmp_path / "model.safetensors")
    said = []
    name = "model policy: model.safetensors"

    def digested(before):
        now = run_inputs.RunInputs({name: run_inputs._read_file(path)}, {})
        assert not now.files[name].sha256
        assert before is None or differences(before, now) == run_inputs.Differences()
        digesting = DigestThread(tmp_path, now, before, said.append)
        digesting.thread.join()
        digesting.close()
        kept = run_inputs.parse_inputs(run_inputs.read(tmp_path))
        assert kept == digesting.inputs
        return kept

    first = digested(None)
    status = path.stat()
    assert first.files[name].sha256 and not said
    large(path, host_facts.BLOCK + 5)  # between two samples
    second = digested(first)
    assert second.files[name].sha256 != first.files[name].sha256
    assert said == [
        f"{name} ({path}) is not the file that the resumed run began with: its size and sampled blocks are the same, "
        "its SHA-256 is not"
    ]
    assert differences(first, second).model == (f"{name} has other content ({status.st_size:,} bytes as before)",)


def test_a_run_that_ends_does_not_wait_for_large_files(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a terabyte of nothing
    now = run_inputs.RunInputs({"model policy: model.safetensors": run_inputs._read_file(path)}, {})
    digesting = DigestThread(tmp_path, now, None, print)
    digesting.close()
    assert not digesting.thread.is_alive() and digesting.inputs == now
