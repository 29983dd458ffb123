"""What a node computes from and what it gives: a function's columns and scope, and the columns that each verb writes,
under which names and up to which length.

Invariant: signatures come from `library`, the package's functions and those of the user's files; nothing is imported or
run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..diagnostics import NOWHERE, Diagnostic, Span, nearest
from ..ir.attributes import CALLED, CallAttributes, GenerateAttributes, ReshardingEdgeAttributes, UpdateAttributes
from ..ir.graph import ELEMENTS, KINDS, Column, Expr, Graph, Node
from ..ir.kinds import LOSS, OPTIMIZER
from ..ir.plan import METRICS, reported
from ..ir.sequences import is_tokens, of_response, sequences, tempered, whole
from ..ir.signatures import FILLED, Signature
from . import states
from .columns import Library


def term_column(graph: Graph, library: Library) -> list[Diagnostic]:
    """Functions and terms of a loss that need a column that their node does not read."""
    found = []
    for node in graph.nodes:
        for call, signature in calls(node, library):
            if lacking(graph, node, signature):
                continue  # with its columns it would not be right either
            renamed = {k: str(a.value) for k, a in zip(call.keys, call.args, strict=True) if a.kind == "column"}
            for parameter in signature.columns:
                column = renamed.get(parameter, parameter)
                if column not in (*node.reads, *node.states, *node.weighs) and parameter not in signature.optional:
                    message = f"`{signature.name}` needs `{column}`, which `{node.name}` does not read"
                    help = _help(graph, node, column, call, signature)
                    if node.verb == "source":
                        message = (
                            f"`{signature.name}` needs `{column}`, and the source has no column or state of this name"
                        )
                        help = f"name one for it: `{signature.name}({parameter} = NAME)`"
                    found.append(Diagnostic("term-column", message, span(call, node), help))
            found += _apart(node, call, signature)
    return found


def _apart(node: Node, call: Expr, signature: Signature) -> list[Diagnostic]:
    """Parameters that a call gives all or none of, and of which it gives some."""
    read, binds = (*node.reads, *node.states), call.columns()
    given = [
        p for p in signature.together if p in call.options() or (p in signature.columns and binds.get(p, p) in read)
    ]
    lacking = [p for p in signature.together if p not in given]
    if not given or not lacking:
        return []
    names = [f"`{p}`" for p in signature.together]
    message = (
        f"`{signature.name}` takes {', '.join(names[:-1])} and {names[-1]} together, and `{node.name}` gives it "
        f"no `{lacking[0]}`"
    )
    help = (
        f"read `{lacking[0]}`, or a column for it"
        if lacking[0] in signature.columns
        else f"write `{signature.name}({lacking[0]} = …)`"
    )
    return [Diagnostic("term-column", message, span(call, node), f"{help}; or give none of them")]


def stale_logp(graph: Graph, library: Library) -> list[Diagnostic]:
    """Terms that go without `old_logp` where a second optimizer step is taken on a batch, or other weights generated
    it."""
    found = []
    for node in graph.verb("update"):
        rows = graph.rows[graph.level(node)]
        said = UpdateAttributes.of(node)
        steps = said.steps(rows)
        behind = max(
            (ReshardingEdgeAttributes.of(e).staleness for e in graph.reshards() if e.src == node.name), default=0
        )
        beside = [u.name for u in graph.sharing(node.worker) if u.verb == "update" and u.name != node.name]
        if steps == 1 and not behind and not beside:
            continue
        for call, signature in calls(node, library):
            given = "old_logp" in call.keys or "old_logp" in node.reads
            if given or "old_logp" not in signature.optional or lacking(graph, node, signature):
                continue
            takes = f"one optimizer step a batch; `{node.name}` takes {steps:,}"
            if steps == 1 and beside:
                takes = f"the only update of a batch; `{beside[0]}` changes the weights of `{node.name}` too"
            elif steps == 1:
                takes = (
                    f"rows of the newest weights; those of `{node.name}` may be {behind} "
                    f"version{'s' * (behind > 1)} behind"
                )
            message = f"`{signature.name}` without `old_logp` is right for {takes}"
            causes = [
                f"`{k}`"
                for k, n in (("mini_batch", steps // said.epochs), ("epochs", said.epochs), ("staleness", behind + 1))
                if n > 1
            ]
            help = f"read `old_logp` from `{node.worker}.infer`" + (
                f", or leave out {' and '.join(causes)}" if causes else ""
            )
            found.append(Diagnostic("stale-logp", message, span(call, node), help))
    return found


def bad_scope(graph: Graph, library: Library) -> list[Diagnostic]:
    """Functions over a group that would get rows, and the other way round."""
    found = []
    for node in graph.nodes:
        if node.verb in ("source", "generate", "infer", "update"):
            continue
        for call, signature in calls(node, library):
            level = graph.level(node)
            whole = node.per == "batch" or (node.per != "row" and graph.unit_level(node) < level)
            if signature.scope == "batch" and node.per != "batch":
                gets = "may get any of them" if node.per == "row" else f"gets those of one `{node.per}`"
                message = f"`{signature.name}` needs all rows of the batch at once, and `{node.name}` {gets}"
                found.append(Diagnostic("bad-scope", message, span(call, node), "write `per = batch`"))
            elif signature.scope == "group" and not whole:
                above = _above(graph, level)
                if {s.per or "batch" for s in states.missets(graph, node)} & {above, "batch"}:
                    continue  # told there, and what is to be added is as wide, or wider
                message = f"`{signature.name}` needs all rows of a group at once, and `{node.name}` may get any of them"
                help = f"add `per = {above}`" if above else "no node above it makes several rows of one"
                found.append(Diagnostic("bad-scope", message, span(call, node), help))
            elif signature.scope == "group" and node.per != "batch" and _of_one(graph, node):
                message = f"`{signature.name}` is over the rows of each `{node.per}`, and that is one row"
                found.append(
                    Diagnostic("bad-scope", message, span(call, node), "generate `samples` of 2 or more", "warning")
                )
            elif signature.scope == "row" and node.per != "row" and ":" not in str(call.value):
                # A function of a user's file says nothing of its scope unless it is marked.
                if node.per != "batch" and _of_one(graph, node):
                    continue  # each group is one row
                message = f"`{signature.name}` is of one row, and `{node.name}` has `per = {node.per}`"
                single = [c for c in node.writes if graph.column(c).per == node.per]
                help = f"leave `per = {node.per}` out"
                if single and node.per != "batch":
                    each = (
                        f"each `{graph.made(level)}`, of which a `{node.per}` has "
                        f"{graph.fan(level, graph.unit_level(node)):,}"
                    )
                    help = (
                        f"let it write a value for {each}, without `per`; a function with `per = {node.per}` makes "
                        f"`{single[0]}` of these"
                    )
                found.append(Diagnostic("bad-scope", message, span(call, node), help))
    return found


def _above(graph: Graph, level: int) -> str:
    """A column of the nearest rows above those of a level; nothing of the source's."""
    return next((c.name for c in graph.columns if level and c.level == graph.under[level]), "")


def _of_one(graph: Graph, node: Node) -> bool:
    """Whether each group that a node is handed has one row."""
    rows, units = (graph.rows[level] for level in (graph.level(node), graph.unit_level(node)))
    return rows == units


def written(graph: Graph, library: Library) -> list[Diagnostic]:
    """What each verb may write."""
    found: list[Diagnostic] = []

    def wrong(node: Node, message: str, help: str) -> None:
        found.append(Diagnostic("bad-value", f"`{node.name}` {message}", node.span, help))

    for node in graph.nodes:
        columns = [graph.column(c) for c in node.writes]
        if kind_of(graph, node.worker) == "function" or any(
            graph.column(c).element not in ELEMENTS for c in (*node.reads, *node.writes)
        ):
            continue  # the type of a column was told to be unknown
        if node.verb != "source":
            _read(graph, node, wrong)
        if node.verb == "generate":
            if node.cuts and graph.level(node):
                help = "leave `partial` out: each row is generated whole"
                wrong(
                    node,
                    "generates from responses; of `partial` an iteration takes the prompts that are whole",
                    help,
                )
            responses = [c for c in columns if c.element == "i32" and [d for d in c.dims if d.ragged]]
            if len(responses) != 1:
                wrong(
                    node,
                    "writes one column of tokens, the response",
                    "declare it as `i32[<= n]`, n the most tokens of a response",
                )
            like = responses[0].name if len(responses) == 1 else ""
            logps = [c for c in columns if c.element == "f32" and like and [d.like for d in c.dims] == [like]]
            masks = [c for c in columns if c.element == "bool" and like and [d.like for d in c.dims] == [like]]
            versions = [c for c in columns if c.element == "i32" and like and [d.like for d in c.dims] == [like]]
            for column in columns:
                own = [*responses, *logps[:1], *masks[:1], *versions[:1]]
                if column not in own and like and GenerateAttributes.of(node).partner is None:
                    help = (
                        f"declare log-probabilities as `f32[{like}]`, a mask as `bool[{like}]`, versions as "
                        f"`i32[{like}]`; functions write the rest"
                    )
                    wrong(node, f"writes `{column.name}`, which no generation gives", help)
        elif node.verb == "infer":
            _inferred(graph, node, columns, wrong)
        elif node.verb == "update" and columns:
            wrong(node, "writes nothing: it changes weights", f"remove `-> {', '.join(node.writes)}`")
    return found


def results(graph: Graph, library: Library) -> list[Diagnostic]:
    """Columns whose type is not what the package's function gives: an array a row where the column holds a number, or
    the reverse."""
    found = []
    columns = {c.name: c for c in graph.columns}
    for node in graph.nodes:
        call = CallAttributes.of(node).call
        entry = library.get(("function", str(call.value))) if call is not None else None
        if (
            call is None or entry is None or ":" in str(call.value)
        ):  # a file's function may mean anything by its annotations
            continue
        response = call.columns().get("response", "response")
        for name, gives in zip(node.gives or node.writes, entry[0].gives, strict=False):
            column = columns.get(name)
            if column is None or not gives or column.element not in ELEMENTS or bool(column.dims) == (gives == "array"):
                continue
            what = "an array" if gives == "array" else "a number"
            message = (
                f"`{entry[0].name}` gives {what} for each row, and `{name}` holds "
                f"{'arrays' if column.dims else 'one value'}"
            )
            right = f"{column.element}[{response}]" if gives == "array" else column.element
            note = ((column.span, f"`{name}` is declared here"),)
            found.append(
                Diagnostic("bad-value", message, span(call, node), f"declare `{name} : {right}`", related=note)
            )
    return found


def _read(graph: Graph, node: Node, wrong: Callable[[Node, str, str], None]) -> None:
    """A model reads tokens, or text; an update reads, too, what its terms need of each token that it reads, or of each
    row."""
    tokens = {c for c in node.reads if is_tokens(graph, c) or graph.column(c).element == "text"}
    for column in map(graph.column, node.reads):
        beside = GenerateAttributes.of(node).partner is not None and column.element == "json"
        beside = beside or any((e.kind, e.value) == ("column", column.name) for e in tempered(graph, node))
        if node.verb != "update" and column.name not in tokens and not beside:
            wrong(
                node,
                f"reads `{column.name}`, which is neither tokens nor text",
                "a model reads columns as `i32[<= 1024]`, and `text`",
            )
        elif node.verb == "update" and column.dims and (like := column.dims[0].like) and like not in tokens:
            tokens.add(like)  # told once
            wrong(
                node,
                f"reads `{column.name}`, a number for each token of `{like}`, and not `{like}`",
                f"add `{like}` to what it reads",
            )
    if not tokens and node.verb != "generate":
        wrong(node, "reads no tokens", "add the columns that its model computes on, in their order")
    read = sequences(graph, node)
    predicts = node.verb in ("infer", "update") and kind_of(graph, node.worker) != "reward_model"
    if predicts and read.scored and not read.context and tokens <= {*node.reads}:
        response = read.scored[0]
        what = f"scores `{response}` with nothing before it, which its first token could be predicted from"
        if not whole(graph, node):
            wrong(node, what, "read a prompt before it, another column of tokens")
        elif node.verb == "update" and not _mask(graph, node, response):
            mask = of_response(graph, graph.writer(response), "bool")
            declare = f"declare `mask : bool[{response}]`, let `{graph.writer(response).name}` write it and "
            wrong(node, what, f"read `{mask}`, which leaves that out" if mask else f"{declare}`{node.name}` read it")


def _mask(graph: Graph, node: Node, response: str) -> bool:
    """Whether a node reads a mask of a response."""
    columns = (graph.column(c) for c in node.reads)
    return any(c.element == "bool" and [d.like for d in c.dims] == [response] for c in columns)


def _inferred(graph: Graph, node: Node, columns: list[Column], wrong: Callable[[Node, str, str], None]) -> None:
    """A number for each token of a column that it reads; or the k best of each and their ids; of a reward model, one
    for each row, too."""
    if (
        kind_of(graph, node.worker) == "reward_model"
        and len(columns) == 1
        and columns[0].element == "f32"
        and not columns[0].dims
    ):
        return
    tokens = {c for c in node.reads if graph.column(c).element == "i32"}
    of = [c.dims[0].like if c.dims else "" for c in columns]
    one = [c for c, like in zip(columns, of, strict=True) if c.element == "f32" and len(c.dims) == 1 and like in tokens]
    kinds = ("f32", "i32") if kind_of(graph, node.worker) == "policy" else ()  # others have no k best
    best = [
        c for c, like in zip(columns, of, strict=True) if c.element in kinds and len(c.dims) == 2 and like in tokens
    ]
    pairs = {(c.element, c.dims) for c in best}
    paired = len(best) == len(pairs) == 2 * len({d for _, d in pairs}) and {e for e, _ in pairs} == {"f32", "i32"}
    alone = len({c.dims[0].like for c in one}) == len(one)
    if (
        len(best) == len(columns) == 2
        and {c.element for c in best} == {"f32", "i32"}
        and len({c.dims[1] for c in best}) == 2
    ):
        what = " and ".join(f"{c.dims[1].size} as `{c.name}`" for c in best)
        wrong(
            node,
            f"writes the best of each token, {what}",
            "declare the ids with the same number as their log-probabilities",
        )
    elif not columns or len(one) + len(best) < len(columns) or not alone or (best and not paired):
        help = (
            "declare it as `f32[response]`, and read `response`; the k best as `f32[response, k]` with their ids, "
            "`i32[response, k]`"
        )
        wrong(node, "writes one number for each token of a column that it reads, or the k best of each", help)


def too_long(graph: Graph, library: Library) -> list[Diagnostic]:
    """Generations that may write more tokens than the response's column holds."""
    found = []
    for node in graph.verb("generate"):
        wanted = GenerateAttributes.of(node).max_tokens
        responses = [c for c in map(graph.column, node.writes) if c.element == "i32" and c.dims and c.dims[0].ragged]
        for column in responses:
            bound = graph.bound(column.name)
            if wanted is not None and wanted > bound:
                message = f"`max_tokens` is {wanted:,}, and `{column.name}` holds at most {bound:,}"
                help = f"declare `{column.name} : i32[<= {wanted}]`, or leave `max_tokens` out"
                note = ((column.span, f"`{column.name}` holds at most {bound:,} tokens"),)
                found.append(Diagnostic("bad-value", message, node.at("max_tokens"), help, related=note))
    return found


def own_metric(graph: Graph, library: Library) -> list[Diagnostic]:
    """Columns that a run would report under the name of a metric of its own."""
    found = []
    for node in graph.nodes:
        for column in map(graph.column, node.writes):
            if column.name in METRICS and reported(graph, column.name):
                help = f"give the column another name, such as `row_{column.name}`"
                found.append(
                    Diagnostic("bad-value", f"`{column.name}` is the name of a metric of every run", column.span, help)
                )
    return found


def taken(node: Node, library: Library) -> set[str]:
    """The columns that the loss of an update takes: by name, as factors of terms, and as what terms are called with."""
    found = _named(UpdateAttributes.of(node).loss)
    for call, signature in calls(node, library):
        found |= {call.columns().get(p, p) for p in signature.columns} | ({*node.reads} if signature.rest else set())
    return found


def _named(loss: Expr) -> set[str]:
    return {str(loss.value)} if loss.kind == "column" else {c for a in loss.args for c in _named(a)}


def calls(node: Node, library: Library) -> Iterator[tuple[Expr, Signature]]:
    """The calls of a node whose signature is known."""
    stated = node.attributes
    for key, form in CALLED.items():
        if key not in stated or form is OPTIMIZER:
            continue
        stack = [stated[key]]
        while stack:
            expr = stack.pop(0)
            entry = library.get(("loss" if form is LOSS else "function", str(expr.value)))
            if expr.kind == "call" and entry:
                yield expr, entry[0]
            elif expr.kind != "call":
                stack[:0] = expr.args


def _help(graph: Graph, node: Node, column: str, call: Expr, signature: Signature) -> str:
    if column not in {c.name for c in graph.columns}:
        if ":" in str(call.value):  # a file's: a program names no arguments of it
            near = nearest(column, (*node.reads, *node.states, *signature.fills, *FILLED))
            rule = f"a parameter has the name of a column that `{node.name}` reads, or a default"
            return f"{near} {rule}" if near.startswith("did you mean") else rule
        return f"read a column for it and name it: `{signature.name}({column} = COLUMN)`"
    help = f"add `{column}` to what `{node.name}` reads"
    writer = next((n.name for n in graph.nodes if column in n.writes), "")
    if writer and writer != node.name and not graph.flow.leads(writer, node.name):
        help += f", and the edge `{writer} -> {node.name}`"
    return help


def lacking(graph: Graph, node: Node, signature: Signature) -> list[str]:
    """What a term of a loss takes that the weights being updated do not give."""
    kind = kind_of(graph, node.worker)
    return signature.unfit(kind) if signature.kind == "loss" and kind in KINDS else []


def span(call: Expr, node: Node) -> Span:
    return call.span if call.span != NOWHERE else node.span


def kind_of(graph: Graph, worker: str) -> str:
    """The kind of a worker; "" where none has this name."""
    return next((w.kind for w in graph.workers if w.name == worker), "")
