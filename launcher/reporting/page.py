"""The page of a run: one HTML file that needs nothing else. Everything that comes from the run is escaped."""

import html
from collections.abc import Mapping
from typing import Any

from launcher.live import duration, number
from launcher.reporting.answers import answers_section
from launcher.reporting.curves import Line, chart, shares
from launcher.run_dir import RunDir

STYLE = """
body{font:15px/1.45 system-ui,sans-serif;color:#111827;margin:2rem auto;max-width:1180px;padding:0 1rem}
h1{margin-bottom:0}h2{margin-top:2.2rem;border-bottom:1px solid #e5e7eb}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(420px,1fr));gap:1rem}figure{margin:0}figure.wide{grid-column:1/-1}
figcaption{font-weight:600}svg{width:100%;height:auto}svg text{font:11px system-ui;fill:#6b7280}
.legend span{margin-right:1rem;white-space:nowrap}
.legend i{display:inline-block;width:.8em;height:.8em;margin-right:.3em}
table{border-collapse:collapse}td,th{text-align:left;padding:.15rem .7rem .15rem 0;vertical-align:top}
pre{margin:0;white-space:pre-wrap;word-break:break-word;font-size:13px}.none,.ids{color:#6b7280}
.group{display:flex;gap:1.2rem;border-top:1px solid #e5e7eb;padding:.8rem 0}.images{flex:0 0 220px}
.images img{max-width:220px;display:block;margin-bottom:.4rem;border:1px solid #e5e7eb}
tr.right td:first-child{color:#059669;font-weight:600}tr.wrong td:first-child{color:#dc2626}.error{color:#dc2626}
"""


def page(run_dir: RunDir, summary: Mapping[str, Any]) -> str:
    title = html.escape(summary["run"])
    parts = [
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{title}</title>",
        f"<meta name='viewport' content='width=device-width'><style>{STYLE}</style></head><body>",
        f"<h1>{title}</h1>{_headline(summary)}",
        "<h2>Learning</h2><div class='charts'>",
        *_learning(summary),
        f"</div>{_evaluations(summary)}<h2>Where the time went</h2><div class='charts'>",
        *_time(summary),
        "</div><h2>What was lost</h2>",
        _lost(summary),
        "<h2>Sampled answers</h2>" if summary["type"] == "rl" else "",
        answers_section(run_dir) if summary["type"] == "rl" else "",
        "</body></html>\n",
    ]
    return "".join(parts)


def _headline(summary: Mapping[str, Any]) -> str:
    facts = {
        "phase": str(summary["phase"] or "unknown"),
        "steps": str(summary["steps"]),
        "wall": duration(summary["wall_secs"]),
        "held-out accuracy": f"{number(summary['first_eval_accuracy'])} → {number(summary['last_eval_accuracy'])}",
        "samples": number(summary["samples"], 0),
        "tokens/s sampled": number(summary["tokens_per_s_rollout"], 0),
        "tokens/s trained": number(summary["tokens_per_s_train"], 0),
        "staleness max": number(summary["staleness_max"], 0),
        "weight sync": f"median {number((summary['sync_secs'] or {}).get('median'), 2)} s, "
        f"max {number((summary['sync_secs'] or {}).get('max'), 2)} s",
        "host memory": f"{number(summary['rss_mb'], 0)} MB",
    }
    cells = "".join(f"<tr><th>{name}</th><td>{html.escape(value)}</td></tr>" for name, value in facts.items())
    error = summary.get("error")
    said = f"<p class='error'>{html.escape(_error(error))}</p>" if error else ""
    return f"<table>{cells}</table>{said}"


def _error(error: object) -> str:
    if isinstance(error, Mapping):
        return f"{error.get('process', '')}: {error.get('message', '')}"
    return str(error)


def _learning(summary: Mapping[str, Any]) -> list[str]:
    curves = summary["curves"]
    held_out = [
        Line(name, [(record["step"], record["accuracy"]) for record in records if _has(record, "accuracy")], dots=True)
        for name, records in summary["evaluations"].items()
    ]
    charts = [chart("Held-out accuracy", held_out, floor=0.0, ceiling=1.0)]
    if summary["type"] == "rl":
        charts += [
            chart("Reward", [Line("mean", curves.get("reward_mean", [])), Line("std", curves.get("reward_std", []))]),
            chart(
                "Accuracy of sampled answers", [Line("accuracy", curves.get("accuracy", []))], floor=0.0, ceiling=1.0
            ),
            chart(
                "Staleness",
                [Line("mean", curves.get("staleness_mean", [])), Line("max", curves.get("staleness_max", []))],
                floor=0.0,
            ),
            chart("Entropy", [Line("entropy", curves.get("entropy", []))]),
        ]
    charts += [
        chart("Loss", [Line("loss", curves.get("loss", []))]),
        chart("Gradient norm", [Line("norm", curves.get("grad_norm", []))], floor=0.0),
    ]
    return charts


def _evaluations(summary: Mapping[str, Any]) -> str:
    """Each evaluation with the versions that answered it."""
    rows = [(name, record) for name, records in summary["evaluations"].items() for record in records]
    body = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{number(record.get('step'), 0)}</td>"
        f"<td>{number(record.get('accuracy'))}</td><td>{number(record.get('rows'), 0)}</td>"
        f"<td>{number(record.get('failed'), 0)}</td>"
        f"<td>{number(record.get('version_min'), 0)}–{number(record.get('version_max'), 0)}</td>"
        f"<td>{number(record.get('secs'), 1)}</td></tr>"
        for name, record in rows
    )
    heads = "".join(f"<th>{head}</th>" for head in ("split", "step", "accuracy", "rows", "failed", "versions", "secs"))
    return f"<details><summary>evaluations</summary><table><tr>{heads}</tr>{body}</table></details>" if rows else ""


def _time(summary: Mapping[str, Any]) -> list[str]:
    curves = summary["curves"]
    secs = {name: value for name, value in summary["secs"].items() if name != "step"}
    return [
        shares("Seconds of all steps, by phase", secs),
        chart(
            "Tokens a second",
            [
                Line("sampled", curves.get("tokens_per_s_rollout", [])),
                Line("trained", curves.get("tokens_per_s_train", [])),
            ],
            floor=0.0,
        ),
        chart(
            "Weight sync: seconds from optimizer to every server",
            [Line("secs", curves.get("sync_secs", []))],
            floor=0.0,
        ),
        f"<p>The trainer waited {number(summary['wait_rollout_secs'], 1)} s for answers; the servers waited "
        f"{number(summary['wait_trainer_secs'], 1)} s for the trainer.</p>",
    ]


def _lost(summary: Mapping[str, Any]) -> str:
    rows = [("void group", reason, count) for reason, count in sorted(summary["void"].items())]
    rows += [("reward error", kind, count) for kind, count in sorted(summary["reward_errors"].items())]
    rows += [("equal rewards in a group", "no signal", summary["equal_reward_groups"] or 0)]
    body = "".join(
        f"<tr><td>{html.escape(what)}</td><td>{html.escape(str(why))}</td><td>{count:g}</td></tr>"
        for what, why, count in rows
    )
    examples = "".join(f"<pre>{html.escape(str(line))}</pre>" for line in summary["void_examples"])
    notes = "".join(f"<li>{html.escape(str(note.get('message', '')))}</li>" for note in summary["notes"])
    return (
        f"<table>{body}</table>"
        + (f"<details><summary>the last void groups</summary>{examples}</details>" if examples else "")
        + (f"<ul>{notes}</ul>" if notes else "")
    )


def _has(record: Mapping[str, Any], name: str) -> bool:
    return isinstance(record.get(name), int | float) and isinstance(record.get("step"), int)
