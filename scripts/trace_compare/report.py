"""The verdict and the Markdown of a comparison, from plain data (which report.json holds too)."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from trace_compare.lockstep import StepRecord

MAX_ROWS = 60
"""Most lines of the table of steps; of more steps those with the largest differences are shown."""

TOP = 12
"""Operations shown by name; report.json has all."""

MAX_FINDINGS = 20


def step_data(record: StepRecord) -> dict[str, Any]:
    """A record as plain data, with the relative differences written out."""
    data = dataclasses.asdict(record)
    data["attention"] = [_with_relative(d) for d in record.attention]
    data["logits"], data["pool"] = _with_relative(record.logits), _with_relative(record.pool)
    data["tokens"] = [dataclasses.asdict(t) | {"near_tie": t.near_tie} for t in record.tokens]
    return data


def _with_relative(difference: Any) -> dict[str, Any]:
    return dataclasses.asdict(difference) | {"relative": difference.relative}


def findings(steps: list[dict[str, Any]], tolerance: float) -> list[str]:
    """What is wrong, in the order in which it happened; empty when the two agree."""
    found = []
    for s in steps:
        where = f"step {s['step']}"
        for layer, d in enumerate(s["attention"]):
            if not d["relative"] <= tolerance:
                found.append(
                    f"{where}: attention of layer {layer} is apart by {d['relative']:.2g} of its "
                    f"largest value ({d['max_abs']:.2g} absolute)"
                )
            if d["not_finite"]:
                found.append(
                    f"{where}: attention of layer {layer} has {d['not_finite']} elements that are "
                    "NaN or infinite"
                )
        for name, label in (("logits", "the logits"), ("pool", "keys and values in the pool")):
            if not s[name]["relative"] <= tolerance:
                found.append(
                    f"{where}: {label} are apart by {s[name]['relative']:.2g} of the largest value"
                )
            if s[name]["not_finite"]:
                found.append(f"{where}: {label} hold {s[name]['not_finite']} NaN or infinities")
        if s["padding"] != 0:
            found.append(f"{where}: attention of padding tokens is {s['padding']:.2g}, not 0")
        found += [f"{where}: {_token_text(t)}" for t in s["tokens"] if not _excused(t)]
    return found


def _excused(token: dict[str, Any]) -> bool:
    """A near tie, or a sampled token: the logits are judged, a draw at the edge is not."""
    return token["near_tie"] or token["sampled"]


def _token_text(token: dict[str, Any]) -> str:
    kind = "near tie" if token["near_tie"] else "sampled" if token["sampled"] else "no near tie"
    return (
        f"row {token['row']} got {token['first']} and {token['second']}, {token['margin']:.2g} "
        f"apart where the logits moved by {token['logits_apart']:.2g} ({kind})"
    )


def features(steps: list[dict[str, Any]]) -> dict[str, int]:
    """How often the workload had what an engine's has."""
    return {
        "steps with prompts beside decoding rows": sum(
            bool(s["prefill_tokens"] and s["decode_tokens"]) for s in steps
        ),
        "steps with a piece of a prompt": sum(s["num_samples"] < s["num_rows"] for s in steps),
        "prompt tokens from the prefix cache": sum(s["num_hit_tokens"] for s in steps),
        "blocks copied on write": sum(s["num_copies"] for s in steps),
        "rows preempted": sum(s["num_preemptions"] for s in steps),
    }


def number(value: float | None) -> str:
    """For a table: few digits, and no digits for counts."""
    if value is None:
        return "-"
    if isinstance(value, int) or (math.isfinite(value) and value == int(value)):
        return f"{int(value):,}"
    return f"{value:.2g}" if abs(value) < 1000 else f"{value:,.0f}"


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> list[str]:
    """Markdown; the first column to the left, the others to the right."""
    head = list(head)
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    return [*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows), ""]


def render(report: dict[str, Any]) -> str:
    """The whole report as Markdown; the picture is differences.png beside it."""
    lines = [
        f"# {report['run']['implementations'][1]} beside {report['run']['implementations'][0]}",
        "",
        *_verdict(report),
        *_what_ran(report),
        "![Differences by step and layer](differences.png)",
        "",
        *_steps(report),
        *_layers(report),
        *_free_run(report),
    ]
    if report["operations"]:
        lines += _operations(report)
    for chip, programs in (report.get("aot") or {}).items():
        lines += ["", f"## Compiled for {chip}, not run", ""]
        lines += [
            f"The same steps with bfloat16 weights and pool, compiled ahead of time for {chip}: "
            "here the kernels are custom calls.",
            "",
            *_programs(programs, report["run"]["implementations"]),
        ]
    lines += _profiles(report)
    return "\n".join(lines).rstrip() + "\n"


def _verdict(report: dict[str, Any]) -> list[str]:
    found, run = report["findings"], report["run"]
    if not found:
        text = f"**They agree**: in {len(report['steps'])} steps nothing is further apart than "
        return [
            text + f"{run['tolerance']:g} of its largest value, and {_tokens_agree(report)}.",
            "",
        ]
    lines = [f"**They do not agree**: {len(found)} findings. The first: {found[0]}.", ""]
    lines += [f"- {text}" for text in found[:MAX_FINDINGS]]
    more = len(found) - MAX_FINDINGS
    return [*lines, *([f"- and {more} more, in report.json"] if more > 0 else []), ""]


def _tokens_agree(report: dict[str, Any]) -> str:
    apart = [t for s in report["steps"] for t in s["tokens"]]
    total = sum(s["num_samples"] for s in report["steps"])
    if not apart:
        return f"all {total} tokens are equal"
    ties = sum(t["near_tie"] for t in apart)
    return (
        f"{total - len(apart)} of {total} tokens are equal ({ties} of the others near ties, "
        f"{len(apart) - ties} sampled)"
    )


def _what_ran(report: dict[str, Any]) -> list[str]:
    run = report["run"]
    sizes = ", ".join(f"{name} {value}" for name, value in run["sizes"].items())
    interpreted = (
        "; the kernels ran in Pallas's interpreter: their numbers are real, their times are not"
        if run["interpreted"]
        else ""
    )
    seen = report["features"]
    missing = [name for name, count in seen.items() if not count]
    lines = [
        "## What ran",
        "",
        f"- `{run['command']}`",
        f"- {run['model']}, weights and pool in {run['dtype']}; {run['requests']} requests, "
        f"seed {run['seed']}; {sizes}",
        f"- {run['device']}{interpreted}",
        f"- {', '.join(f'{name} {version}' for name, version in run['versions'].items())}",
        "- in the workload: " + ", ".join(f"{v:,} {k}" for k, v in seen.items() if v),
    ]
    if missing:
        lines.append(f"- **not in the workload**: {', '.join(missing)}; more requests or steps")
    return [*lines, ""]


def _steps(report: dict[str, Any]) -> list[str]:
    steps = report["steps"]
    shown = sorted(steps, key=lambda s: -_worst(s)[1]["relative"])[:MAX_ROWS]
    left_out = len(steps) - len(shown)
    lines = [
        "## By step",
        "",
        "Both start each step from the same state, which goes on with the results of "
        f"{report['run']['implementations'][0]}: differences do not add up. Relative ones are to "
        "the largest absolute value of the tensor. *Attention work* is what the step's attention "
        "must do at least in all layers, whoever computes it: both products over the tokens that "
        "each may see, and the bytes of keys and values read once, of queries, outputs and new "
        "keys and values.",
        "",
    ]
    if left_out:
        lines += [f"The {MAX_ROWS} of {len(steps)} steps with the largest differences:", ""]
    head = (
        *("step", "bucket", "rows", "prefill", "decode", "copies", "preempted"),
        *("attention, worst (layer)", "relative", "logits", "relative", "pool"),
        *("tokens", "attention work: kFLOP", "kB"),
    )
    rows = []
    for s in sorted(shown, key=lambda s: s["step"]):
        layer, d = _worst(s)
        rows.append(
            (
                *(s["step"], s["bucket"], s["num_rows"], s["prefill_tokens"], s["decode_tokens"]),
                *(s["num_copies"] or "", s["num_preemptions"] or ""),
                *(f"{d['max_abs']:.1e} ({layer})", f"{d['relative']:.1e}"),
                *(f"{s['logits']['max_abs']:.1e}", f"{s['logits']['relative']:.1e}"),
                *(f"{s['pool']['max_abs']:.1e}", _tokens_cell(s)),
                *(number(round(s["work"]["flops"] / 1e3)), number(round(s["work"]["bytes"] / 1e3))),
            )
        )
    return [*lines, *table(head, rows)]


def _worst(step: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """(layer, difference) of the layer that is furthest apart."""
    return max(enumerate(step["attention"]), key=lambda item: item[1]["relative"])


def _tokens_cell(step: dict[str, Any]) -> str:
    if not step["tokens"]:
        return f"{step['num_samples']} equal" if step["num_samples"] else "-"
    return "; ".join(_token_text(t) for t in step["tokens"])


def _layers(report: dict[str, Any]) -> list[str]:
    rows = []
    for layer in range(len(report["steps"][0]["attention"])):
        step, d = max(
            ((s["step"], s["attention"][layer]) for s in report["steps"]),
            key=lambda item: item[1]["relative"],
        )
        largest = max(s["attention"][layer]["max_abs"] for s in report["steps"])
        rows.append((layer, f"{largest:.1e}", f"{d['relative']:.1e}", step))
    head = ("layer", "attention apart, at most", "relative, at most", "in step")
    return ["## By layer", "", *table(head, rows)]


def _free_run(report: dict[str, Any]) -> list[str]:
    free = report.get("free_run")
    if free is None:
        return []
    if free["first_step"] is None:
        text = f"their tokens are equal in all {free['steps'][0]} steps"
    else:
        text = f"their tokens first differ in step {free['first_step']}, row {free['first_row']}"
    return [
        "## Each on its own way",
        "",
        f"Served from the start to the end with each one's own tokens, {text}; "
        f"{free['num_equal']} of {free['num_requests']} requests have equal outputs.",
        "",
    ]


def _operations(report: dict[str, Any]) -> list[str]:
    run = report["run"]
    lines = [
        "## Operations",
        "",
        "Of the whole step that the engine runs (schedule, copy blocks, model, sample, commit), by "
        "bucket. Counts are static: a loop's body counts once, whatever its trips. XLA's cost "
        "analysis cannot look into a custom call: what a kernel computes and reads is in neither "
        "its FLOPs nor its bytes (it may even count a call as -1), which is why a program with "
        "kernels looks cheaper there than it is. *Attention work* (as above; here the mean of the "
        "bucket's steps) is what the kernels do at least.",
        "",
    ]
    if run["interpreted"]:
        lines += [
            "The kernels are interpreted: in the jaxpr they are what a GPU would run, in the HLO "
            "they are the interpreter, a callback to Python for each load, store and barrier.",
            "",
        ]
    work = {}
    for bucket in report["operations"]:
        steps = [s["work"] for s in report["steps"] if str(s["bucket"]) == str(bucket)]
        work[bucket] = {k: sum(w[k] for w in steps) / len(steps) for k in ("flops", "bytes")}
    return [*lines, *_programs(report["operations"], run["implementations"], work)]


def _programs(
    programs: dict[str, dict[str, Any]], names: list[str], work: dict[str, dict] | None = None
) -> list[str]:
    lines = []
    for bucket, of in programs.items():
        lines += [f"### Bucket of {bucket} tokens", ""]
        rows = [
            ("FLOPs, by XLA", *(number(of[n]["cost"].get("flops")) for n in names)),
            ("bytes accessed, by XLA", *(number(of[n]["cost"].get("bytes")) for n in names)),
        ]
        if work:
            for key, label in (("flops", "FLOPs"), ("bytes", "bytes")):
                rows.append((f"attention work, {label}", *[number(round(work[bucket][key]))] * 2))
        rows += [
            (f"{kind} bytes", *(number(of[n]["memory"].get(kind)) for n in names))
            for kind in ("argument", "output", "alias", "temp")
        ]
        rows += [
            ("jaxpr primitives", *(number(sum(of[n]["jaxpr"].values())) for n in names)),
            ("primitives inside kernels", *_sums(of, names, "in_kernels")),
            ("HLO instructions", *_sums(of, names, "hlo")),
        ]
        rows += [(f"kernel {k}", *c) for k, c in _counts(of, names, "kernels")]
        lines += table(("", *names), rows)
        for key, label in (("jaxpr", "jaxpr primitive"), ("hlo", "HLO instruction")):
            lines += table((label, *names), [(f"`{k}`", *c) for k, c in _counts(of, names, key)])
        calls = _counts(of, names, "custom_calls")
        if calls:
            lines += table(("custom call", *names), [(f"`{k}`", *c) for k, c in calls])
    return lines


def _sums(of: dict[str, Any], names: list[str], key: str) -> list[str]:
    return [number(sum(of[name][key].values())) for name in names]


def _counts(of: dict[str, Any], names: list[str], key: str) -> list[tuple[str, list[str]]]:
    """The most frequent of a count in either program, with both counts."""
    most: Counter = Counter()
    for name in names:
        for operation, count in of[name][key].items():
            most[operation] = max(most[operation], count)
    return [
        (operation, [number(of[name][key].get(operation, 0)) for name in names])
        for operation, _ in most.most_common(TOP)
    ]


def _profiles(report: dict[str, Any]) -> list[str]:
    if not report["profiles"]:
        return []
    lines = [
        "## Profiles",
        "",
        f"Of {report['run']['profiled']}. Open the files at <https://ui.perfetto.dev> (it reads "
        "them in the browser and sends nothing), or the folders with xprof. A slice contains "
        "those nested in it.",
        "",
    ]
    for name, profile in report["profiles"].items():
        lines += [f"**{name}**: `{profile['path']}`, {profile['events']:,} slices", ""]
        rows = [(f"`{_short(n)}`", number(c), f"{ms:.2f}") for n, c, ms in profile["longest"]]
        lines += table(("slice", "count", "ms"), rows)
    return lines


def _short(name: str) -> str:
    name = name.replace("|", "/").replace("`", "'")
    return name if len(name) <= 70 else name[:67] + "..."
