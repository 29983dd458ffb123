"""One field declares an option: its flag, its argument in Python, its checks and its documentation follow from it."""

import ast
import inspect

import msgspec
import pytest
from folders import ROOT

from msrl_graph import Fault, compile, export, run, simulate
from msrl_graph.cli.run import parser
from msrl_graph.diagnostics.surface import by_surface, name_option, show_on
from msrl_graph.ir.run_options import ExportOptions, RunOptions
from msrl_graph.reference import option_page

PACKAGE = ROOT / "msrl_graph"
OPTIONS = [*RunOptions.declared(), *ExportOptions.declared()]
# The commands themselves, and pages about them.
SURFACES = ("cli/", "reference/")


def test_every_option_is_a_flag_and_every_other_flag_is_of_compiling_or_showing():
    actions = {action.dest: action for action in parser()._actions}
    others = {"help", "file", "deploy", "sets", "diagnostics", "color"}
    assert actions.keys() - others == {option.name for option in OPTIONS}
    for option in OPTIONS:
        action = actions[option.name]
        assert action.option_strings == [option.flag] and action.default == option.default, option.name
        assert (action.nargs == 0) == (option.kind == "switch"), option.name


def test_run_has_the_options_as_arguments_with_their_types_and_defaults():
    found = dict(inspect.signature(run).parameters)
    declared = dict(inspect.signature(RunOptions).parameters)
    assert next(iter(found)) == "plan" and found.keys() - declared.keys() == {"plan", "stderr", "on_iteration"}
    for name, parameter in declared.items():
        assert found[name] == parameter, name
    assert "- `nice=N`: add N to the niceness of compute processes (N from 0 to 19).\n" in run.__doc__
    assert "without `out`, write to the run's folder" in run.__doc__


def test_export_has_its_options_as_arguments():
    arguments = [option.argument for option in ExportOptions.declared()]
    assert [*inspect.signature(export).parameters] == [*arguments, "plan"]


def test_an_unknown_argument_is_named_as_python_does():
    with pytest.raises(TypeError, match=r"^run\(\) got an unexpected keyword argument 'recrod'"):
        run(None, recrod=True)


WRONG = {
    "switch": [("yes", "is True or False, not a str"), (None, "is True or False, not None")],
    "number": [("3", "not a str"), (-1, "not -1"), (True, "not True"), (2**54, f"not {2**54}")],
    "location": [(3, "is a folder, a str or a Path, not an int")],
    "text": [(3, "is a str, not an int")],
}


@pytest.mark.parametrize("option", RunOptions.declared(), ids=lambda option: option.name)
def test_a_value_of_the_wrong_type_is_refused(option):
    plan = compile("grpo", model="tiny")
    for value, why in WRONG[option.kind]:
        with pytest.raises(Fault, match=f"`{option.name}` .*{why}"):
            run(plan, **{option.name: value})
    if option.most is not None:
        with pytest.raises(Fault, match=f"`{option.name}` is a whole number from 0 to {option.most}, not"):
            run(plan, **{option.name: option.most + 1})


@pytest.mark.parametrize("option", [option for option in RunOptions.declared() if not option.evaluates])
def test_options_of_training_do_not_go_with_evaluate(option, capsys):
    value = {"switch": True, "number": 1, "location": "x", "text": "x"}[option.kind]
    with pytest.raises(Fault, match=f"`evaluate` trains nothing: `{option.name}` does not go with it"):
        run(compile("grpo", model="tiny"), evaluate=True, **{option.name: value})


def test_options_are_sent_as_json(tmp_path):
    options = RunOptions(tmp_path, resume=tmp_path / "run", nice=3, record=True)
    assert options.out == str(tmp_path)
    assert msgspec.json.decode(msgspec.json.encode(options), type=RunOptions) == options


def test_an_option_is_named_as_its_surface_does():
    assert name_option("metrics_port") == "--metrics-port" and name_option("resume", "x") == "--resume x"
    assert name_option("record", True) == "--record"
    with show_on("Python"):
        assert name_option("metrics_port") == "`metrics_port`" and name_option("resume", "x") == "resume=x"
        assert name_option("record", True) == "`record=True`"
        with show_on("command line"):  # the outermost caller decides
            assert by_surface(command_line="a", python="b") == "b"
    assert by_surface(command_line="a", python="b") == "a"


def texts(tree):
    """Texts in code, without docstrings."""
    documentation = {id(item.value) for item in ast.walk(tree) if isinstance(item, ast.Expr)}
    for item in ast.walk(tree):
        if isinstance(item, ast.Constant) and isinstance(item.value, str) and id(item) not in documentation:
            yield item.lineno, item.value


def test_only_commands_write_flags_and_names_of_options_exist():
    """All other code names an option with `name_option`."""
    known = {option.name for option in OPTIONS}
    known |= {name for function in (compile, simulate) for name in inspect.signature(function).parameters}
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for call in (item for item in ast.walk(tree) if isinstance(item, ast.Call)):
            if getattr(call.func, "id", "") == "name_option" and isinstance(call.args[0], ast.Constant):
                wrong += [f"{file}: {call.args[0].value}"] if call.args[0].value not in known else []
        if not file.startswith(SURFACES):
            flags = {option.flag for option in OPTIONS}
            wrong += [f"{file}:{line}: {flag}" for line, text in texts(tree) for flag in flags & {*text.split()}]
    assert wrong == []


def test_the_page_of_options_is_up_to_date():
    page = ROOT / "docs" / "reference" / "options.md"
    assert page.read_text(encoding="utf-8") == option_page.document(), "run `make docs`"
