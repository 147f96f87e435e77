#!/usr/bin/env python
"""Play an engine's event log again: every state of its scheduler, bit for bit.

    python scripts/serve_local.py --event-log runs/events.log   # write one
    python scripts/replay.py runs/events.log                    # step through it by hand
    python scripts/replay.py runs/events.log verify             # every state is the recorded one
    python scripts/replay.py runs/events.log verify --model smollm2-135m     # and every token
    python scripts/replay.py runs/events.log show 120
    python scripts/replay.py runs/events.log diff 118 120
    python scripts/replay.py runs/events.log bisect check_invariants
    python scripts/replay.py runs/events.log bisect 'blocks.num_free > 10' --linear

docs/replay.md tells more.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, 1 when something was found (a state that differs, a predicate
    that fails, a damaged log), 2 for a mistake in the command."""
    args = _parser().parse_args(argv)
    from pagedjax.replay import Player, describe_log, read_log

    try:
        log = read_log(args.log)
        if args.command in (None, "step", "verify"):
            _print(describe_log(log))
        elif log.problem:
            print(f"PROBLEM  {log.problem}")
        _keep_compiled()
        if args.command == "verify" and args.model is not None:
            return _verify_whole(log, args)
        player = Player(log)
        return args.run(player, args)
    except (OSError, ValueError, IndexError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _keep_compiled() -> None:
    """As the server does: the next time these programs are compiled already."""
    from pagedjax.config import EngineConfig
    from pagedjax.engine.build import compilation_cache_dir, use_compilation_cache

    folder = compilation_cache_dir(EngineConfig())
    if folder is not None:
        use_compilation_cache(folder)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("log", type=Path, help="what --event-log has written")
    parser.set_defaults(run=_interactive, command=None)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def command(name: str, run: Any, words: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=words, description=words)
        sub.set_defaults(run=run)
        return sub

    verify = command("verify", _verify, "compare every state with its checksum")
    verify.add_argument(
        "--model",
        help="compute every token again with this model, too: a preset's name, a Hugging Face "
        "directory or a GGUF file. The log needs event_log_text.",
    )
    show = command("show", _show, "the state after a step")
    show.add_argument("step", type=int)
    diff = command("diff", _diff, "what happened from one step to another")
    diff.add_argument("first", type=int)
    diff.add_argument("last", type=int)
    bisect = command("bisect", _bisect, "the first step after which a predicate fails")
    bisect.add_argument(
        "predicate",
        help="check_invariants, or a Python expression that is true of a sound state, over rows, "
        "blocks, prefix, counters, step, Status, config and np",
    )
    bisect.add_argument(
        "--linear",
        action="store_true",
        help="look at every state. Otherwise by halves, which is right only if what fails once "
        "fails from then on.",
    )
    command("step", _interactive, "step through it by hand (the default)")
    return parser


def _verify(player: Any, args: argparse.Namespace) -> int:
    count = sum("sums" in step.result for step in player.log.steps[: player.num_steps])
    first = next((mismatch for mismatch in player.verify() if mismatch is not None), None)
    if first is not None:
        print(f"DIFFERS  {first}")
        return 1
    print(f"verified {count} of {player.num_steps} states have checksums, and all are equal")
    return 1 if player.log.problem else 0


def _verify_whole(log: Any, args: argparse.Namespace) -> int:
    from pagedjax.config import load_config
    from pagedjax.engine import build_engine
    from pagedjax.engine.snapshot import check_fingerprint
    from pagedjax.replay import verify_whole

    given = log.header["engine"].items()
    settings = {name: value for name, value in given if not name.startswith("event_log")}
    engine = build_engine(args.model, load_config(None, settings), warm_up=False)
    check_fingerprint(log.header["fingerprint"], engine.fingerprint, what="the log")
    _warn_of_platform(log, engine)
    compared = 0
    for difference in verify_whole(log, engine.device):
        if difference is not None:
            print(f"DIFFERS  {difference}")
            return 1
        compared += 1
    print(f"verified {compared} steps computed again, and all that is recorded of them is equal")
    return 1 if log.problem else 0


def _warn_of_platform(log: Any, engine: Any) -> None:
    import jax

    ours = (jax.__version__, engine.device_name)
    theirs = (log.header["jax"], log.header["device"])
    if ours != theirs:
        print(
            f"note     written with jax {theirs[0]} on {theirs[1]}, played with {ours[0]} on "
            f"{ours[1]}: numbers may differ in their last bits"
        )


def _show(player: Any, args: argparse.Namespace) -> int:
    from pagedjax.replay import describe_state

    state = player.state(args.step)
    num_tokens = player.log.steps[args.step - 1].num_tokens if args.step else None
    _print(describe_state(state, args.step, num_tokens))
    return 0


def _diff(player: Any, args: argparse.Namespace) -> int:
    from pagedjax.replay import describe_changes

    for number in (args.first, args.last):
        player.state(number)  # says what is out of range
    if args.first > args.last:
        raise ValueError(f"the first step must not come after the last ({args.last})")
    _print(describe_changes(player, args.first, args.last))
    return 0


def _bisect(player: Any, args: argparse.Namespace) -> int:
    from pagedjax.replay import compiled_predicate, first_failure

    holds = compiled_predicate(args.predicate, player)
    number = first_failure(player, holds, linear=args.linear)
    if number is None:
        where = "after every step" if args.linear else "after the last step"
        print(f"holds    {where}, of {player.num_steps}")
        return 0
    print(f"FAILS    first fails at step {number}")
    if number:
        args.first, args.last = number - 1, number
        _diff(player, args)
    return 1


def _interactive(player: Any, args: argparse.Namespace) -> int:
    from pagedjax.replay.interactive import Shell

    Shell(player).cmdloop()
    return 0


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


if __name__ == "__main__":
    sys.exit(main())
