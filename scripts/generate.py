#!/usr/bin/env python
"""Complete a prompt, or answer a message, and print the text as it comes.

python scripts/generate.py "The capital of France is"
python scripts/generate.py --chat "Why is the sky blue?" --temperature 0
echo "Once upon a time" | python scripts/generate.py --max-tokens 100
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tyro

from pagedjax.config import EngineConfig, parse_args


@dataclass(frozen=True, kw_only=True)
class Args:
    """Command line of generate.py."""

    prompt: Annotated[str | None, tyro.conf.Positional] = None
    """The text. None: read from standard input."""

    model: str = "smollm2-135m"
    """A preset's name, a Hugging Face directory or a GGUF file."""

    chat: bool = False
    """Take the text as a user's message and answer it."""

    max_tokens: int = 256
    """Most tokens to generate."""

    temperature: float = 0.8
    """0 takes the likeliest token each time."""

    top_p: float = 0.95
    """Sample from the likeliest tokens that together have this probability."""

    sampling_seed: int | None = None
    """Equal seeds give equal text."""

    stop: tuple[str, ...] = ()
    """Texts that end it."""

    config: Path | None = None
    """TOML file of engine settings; flags override it."""

    engine: EngineConfig = field(default_factory=EngineConfig)


def main() -> int:
    """Returns the exit status."""
    args = parse_args(Args, description=__doc__.split("\n")[0])
    try:
        return _generate(args)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _generate(args: Args) -> int:
    from pagedjax.engine import build_engine
    from pagedjax.sampling_params import SamplingParams
    from pagedjax.tokenizers import apply_chat_template

    prompt = args.prompt if args.prompt is not None else sys.stdin.read().rstrip("\n")
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.sampling_seed,
        stop=list(args.stop) or None,
    )
    # One request needs two or three step sizes: each is compiled when it is first needed.
    engine = build_engine(
        args.model,
        args.engine,
        progress=False,
        warm_up=False,
    )
    if args.chat:
        prompt = apply_chat_template(engine.tokenizer, [{"role": "user", "content": prompt}])
    engine.add_request("0", prompt, params, add_special_tokens=not args.chat)
    if not args.chat:
        print(prompt, end="", flush=True)
    while engine.has_work():
        for output in engine.step():
            print(output.outputs[0].text, end="", flush=True)
            if output.error:
                raise ValueError(output.error)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
