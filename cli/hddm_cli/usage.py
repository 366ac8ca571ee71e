"""How a verb is used: its help, with options by topic, and wrong usage in one line.

Typer brings its own copy of click, or does not, by its version; so its objects are known by what they hold.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from hddm.utils.addresses import in_addresses
from hddm.utils.errors import UsageError, choose, did_you_mean, words
from hddm.utils.processes import is_first

if TYPE_CHECKING:
    from hddm.utils.needs import Needs

_TOPICS = {
    "Network": "size prediction rotary schedule noise_range lora_rank lora_alpha num_heads sample_size "
    "preset prediction_type data_range text_dim",
    "Weights": "allow_pickle weights variant licence",
    "Training": "optimizer learning_rate muon_learning_rate warmup ema_decay weighting time_sampling "
    "snr_gamma weak_at",
    "Conditions": "class_conditional text_conditional condition_dropout",
    "Checkpoints and logs": "allow_config_change checkpoint_every tracker run_name sample_every held_out "
    "validate_every",
    "Processes": "parallel ray retries num_replicas resources",
    "Experts": "expert router_every add remove share domain classes",
    "VAE and text encoder": "vae text_encoder tokenizer text_encoder_lora",
    "Image size": "resolution height width",
    "Content": "prompts negative_prompt long_prompt clip_skip class_labels conditions",
    "Editing": "init_image strength mask resampling_steps edit_from",
    "Guidance": "guidance_scale guide_by cfg_channels guidance_interval guidance_rescale "
    "guidance_norm",
    "Features": "features cache save_classifier",
    "Students of few steps": "sampling_steps trajectories",
    "Limits": "max_images max_steps max_pixels max_upload max_queue timeout",
    "Speed and memory": "batch_size batching device dtype offload max_memory compile quantize "
    "mixed_precision gradient_accumulation_steps gradient_checkpointing shard_weights threads",
}
_WORDS = {
    "FOLDER": "out cache jobs vae text_encoder tokenizer init base data reference add",
    "FILE": "config schedule conditions init_image mask captions classes picture results save_classifier",
    "STEPS": "warmup checkpoint_every sample_every",
    "IMAGES": "batch_size max_bad",
    "PIXELS": "resolution height width max_pixels",
    "SIDE": "sample_size",
    "BYTES": "max_upload",
    "NUMBER": "start parallel retries workers max_queue router_every resampling_steps expert text_dim "
    "clip_skip gradient_accumulation_steps trajectories",
    "SHARE": "condition_dropout weak_at strength guidance_rescale",
    "TEXT": "edit_from prompts negative_prompt",
    "ADDRESS": "host ray",
    "TRACKER:PROJECT": "tracker",
    "LOW:HIGH": "noise_range",
    "LOW,HIGH": "data_range",
}


def _titles(table: Mapping[str, str]) -> dict[str, str]:
    """The title that each name stands under in a table of names by title."""
    found = {}
    for title, names in table.items():
        for name in names.split():
            found[name] = title
    return found


TOPIC_OF, WORD_OF = _titles(_TOPICS), _titles(_WORDS)
_FIELD = re.compile(r"`([a-z][a-z0-9_]*)(?:=True)?`")
_FEW = 8
"""Most parameters of a verb whose options need no topics."""


class Verb(TyperCommand):
    """A verb whose help shows options by topic, and a word for each value in place of its Python type.

    An option's own ``rich_help_panel`` and ``metavar`` have precedence over the tables above.
    """

    def make_parser(self, ctx: Any) -> Any:
        parser: Any = super().make_parser(ctx)
        parse = parser.parse_args

        def parsed(args: list[str]) -> Any:
            words = list(args)
            found = parse(args=args)
            _refuse_repeated(parse, words, found[2])
            return found

        parser.parse_args = parsed
        return parser

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces = ["[OPTIONS]"]
        for one in self.params:
            if one.param_type_name == "argument":
                pieces.append(_term(one) if one.required else f"[{_term(one)}]")
        return pieces

    def format_options(self, ctx: Any, formatter: Any) -> None:
        topics: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for one in self.get_params(ctx):
            topic = "Arguments" if one.param_type_name == "argument" else "Options"
            if topic == "Options" and len(self.params) > _FEW:
                topic = getattr(one, "rich_help_panel", None) or TOPIC_OF.get(one.name or "", topic)
            topics.setdefault(topic, []).append((_term(one), _text(one)))
        for topic, rows in topics.items():
            if rows:
                with formatter.section(topic):
                    formatter.write_dl(rows)


def _refuse_repeated(parse: Callable[..., Any], words: Sequence[str], given: Sequence[Any]) -> None:
    """Refuse an option that takes one value and stands among the ``words`` several times.

    ``given`` are the parameters that ``parse`` finds in them. The last value would count, as nothing shows.
    """
    for param, times in Counter(given).items():
        if times == 1 or param.param_type_name != "option" or param.multiple:
            continue
        values = _values_of(param, parse, words)
        if not param.is_flag:
            raise UsageError(f"{param.opts[0]} {' and '.join(values)}: takes one value; keep one")
        if len(set(values)) > 1:
            raise UsageError(f"{' and '.join(values)}: contradict each other; keep one")


def _values_of(param: Any, parse: Callable[..., Any], words: Sequence[str]) -> list[str]:
    """What an option that stands among the ``words`` several times is given each time, as typed."""
    values: list[str] = []
    for end in range(1, len(words) + 1):
        try:
            found, _, order = parse(args=list(words[:end]))
        except Exception:  # these words end within an option
            continue
        # The last value counts, so each further one shows once it is among the words.
        if order.count(param) > len(values):
            value = found[param.name]
            if param.is_flag:
                value = (param.opts if value else param.secondary_opts)[0]
            values.append(value if isinstance(value, str) else " ".join(value))
    return values


def as_typed(text: str) -> str:
    """A text of the library as users typed it: options for arguments in backticks, addresses for copies."""
    return in_addresses(_FIELD.sub(lambda found: f"--{found[1].replace('_', '-')}", text))


def say(text: str, err: bool = False) -> None:
    """Print a text of the library, once where several processes train together."""
    if err or is_first():
        typer.echo(as_typed(text), err=err)


def show(*needs: "Needs", more: Sequence[str] = ()) -> None:
    """Print what a command will need, and ``more`` lines about it."""
    for one in needs:
        for line in one.lines():
            say(line)
    for line in more:
        say(line)
    say("dry run: nothing is written; what is about is measured on few samples here, and scaled")


def _word(param: Any) -> str:
    """The word for a value: its choices, else one of the table, else the last word of the name."""
    choices = getattr(getattr(param, "type_descriptor", None) or param.type, "choices", None)
    last = param.name.split("_")[-1].upper()
    known = WORD_OF.get(param.name, last) if param.param_type_name == "option" else last
    return param.metavar or "|".join(choices or ()) or known


def _term(param: Any) -> str:
    if param.param_type_name == "argument":
        return f"{_word(param).removesuffix('S')}..." if param.nargs == -1 else _word(param)
    names = " / ".join((*param.opts, *param.secondary_opts))
    return names if param.is_flag else f"{names} {_word(param)}"


def _text(param: Any) -> str:
    parts = [param.help or ""]
    if not getattr(param, "is_flag", True):
        if param.multiple:
            parts.append("May be repeated.")
        if param.required:
            parts.append("Required.")
        if param.default is not None:
            parts.append(f"Default: {str(param.default).strip('()')}.")
    return " ".join(parts)


def wording(error: Any) -> str | None:
    """The line for a failure of the command line's parser, None for any other error."""
    if not hasattr(error, "format_message"):
        return None
    context: Any = getattr(error, "ctx", None)
    verb = context.command_path if context else "hddm"
    if hasattr(error, "option_name"):
        return _of_option(error, verb)
    if hasattr(error, "param"):
        return _of_value(error, verb)
    unknown = re.search(r"No such command '(.*?)'", error.message)
    if unknown:
        known = list(context.command.commands)
        return f"{unknown[1]} is not a command of {verb}; {choose(unknown[1], known)}"
    return f"{_sentence(error.message)}; {verb} --help shows what it takes"


def _of_option(error: Any, verb: str) -> str:
    option = error.option_name
    if not hasattr(error, "possibilities"):
        return f"{option}: {_sentence(error.message).removeprefix(f'option {option!r} ')}"
    known: list[str] = []
    for one in error.ctx.command.params:
        known += [*one.opts, *one.secondary_opts]
    nearest = did_you_mean(option, known) or f"; {verb} --help lists what there is"
    return f"{option}: no such option of {verb}{nearest}"


def _of_value(error: Any, verb: str) -> str:
    param = error.param
    name = param.opts[0] if param.param_type_name == "option" else _word(param)
    if hasattr(error, "param_type"):
        return f"{name} is required; {verb} --help says what it is"
    chosen = re.search(r"'(.*?)' is not one of (.+?)\.?$", error.message)
    if chosen:
        known = re.findall(r"'([^']*)'", chosen[2])
        return f"{name} {chosen[1]}: {choose(chosen[1], known)}"
    problems = error.__cause__.errors() if hasattr(error.__cause__, "errors") else []
    if problems:
        return f"{name} {problems[0]['input']}: {words(problems[0])}"
    return f"{name}: {_sentence(error.message)}"


def _sentence(message: str) -> str:
    """As a part of a line: no capital at its beginning, no full stop at its end."""
    text = " ".join(message.split()).removesuffix(".")
    return text[:1].lower() + text[1:]
