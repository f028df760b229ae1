"""The command line, `thermopile`: a thin shell over the library.

Commands import what they need when they run: `--help` must not wait for torch.
"""

import errno
import io
import logging
import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

import click

from .._version import __version__
from ..pipeline.errors import DatasetError, DatasetExistsError, SourceError
from ..state_store.errors import StateStoreError, StoreMismatchError
from ..storage.bucket_errors import AddressError
from ..trainer.errors import ConfigError, RunError, RunExistsError, TrainingError
from .printing import MAX_ERROR_CHARACTERS, plain_text

COMMANDS = {
    "convert": (".convert_commands:command", "Convert a source to a dataset directory, or check one."),
    "show": (".show:show", "Draw samples of a dataset and their augmented views."),
    "train": (".train:command", "Train encoders with a temperature per sample."),
    "score": (".score:score", "Judge pairs by a model that is not trained on them."),
    "fork": (".fork:fork", "Go on from a checkpoint of a run with one thing changed, as a new run."),
    "presets": (".settings:presets", "List the presets."),
    "settings": (".settings:settings", "Explain the settings."),
    "status": (".status:status", "Show whether a run trains, and its progress."),
    "inspect": (".inspect_command:command", "Summarise the temperatures of a run."),
    "curate": (".curate:curate", "Choose what to train on next."),
    "eval": (".eval:eval_", "Score the features of a run's encoders."),
    "effect": (".effect:effect", "Compare the scores of runs on the same test samples."),
    "embed": (".embed:command", "Write the features of a dataset to a file."),
    "export": (".export:command", "Write a run's encoders to files."),
    "state": (".state:state", "Check the state of the samples, and list its snapshots."),
    "bench": (".bench.commands:bench", "Measure what this machine can do."),
}
"""Name -> where the command is, and what `thermopile --help` says of it."""

WRONG_USAGE = (AddressError, ConfigError, DatasetExistsError, RunExistsError, StoreMismatchError)
FAILURES = (DatasetError, SourceError, StateStoreError, RunError, TrainingError, OSError)


class _Group(click.Group):
    """Imports a command once it is named: `thermopile --help` waits for none.

    Turns every error into one line on stderr and an exit code, unless --debug asks for the traceback.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, name = COMMANDS[cmd_name][0].split(":")
        command: click.Command = getattr(import_module(module, __package__), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, words) for name, (_, words) in COMMANDS.items()])

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # click handles these; it ends silently when the reader of a pipe, such as `head`, is done
        except Exception as error:
            if context.params["debug"]:
                raise
            raise _one_line(error) from error


class _WrongUsage(click.ClickException):
    exit_code = 2


def _one_line(error: Exception) -> click.ClickException:
    if isinstance(error, UnicodeEncodeError):
        line = error.object[error.object.rfind("\n", 0, error.start) + 1 :].partition("\n")[0]  # it may be a whole file
        text = f"{line!r} is not valid UTF-8; rename the file, directory or class"
        return _WrongUsage(plain_text(text, MAX_ERROR_CHARACTERS))
    text = str(error) or type(error).__name__
    # Python's own text of a system's error begins with errno.
    if isinstance(error, OSError) and error.errno is not None and error.strerror is not None:
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        text = f"{where}{error.strerror}" + (f"; {cure}" if (cure := _CURES.get(error.errno)) else "")
    if not isinstance(error, WRONG_USAGE + FAILURES):
        why = "; ".join(getattr(error, "__notes__", ())) or "this should not happen"
        text = f"{type(error).__name__}: {text} ({why}; `thermopile --debug …` shows the traceback)"
    text = plain_text(text, MAX_ERROR_CHARACTERS)  # it may quote an untrusted file
    return _WrongUsage(text) if isinstance(error, WRONG_USAGE) else click.ClickException(text)


_CURES = {
    errno.EROFS: "write elsewhere with --to or --out, or copy it to a writable disk",
    errno.EACCES: "change its permissions, or write elsewhere with --to or --out",
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EMFILE: "raise the limit with `ulimit -n`",
}


@click.group(
    cls=_Group,
    epilog="\b\nExamples:\n"
    "  thermopile convert glyphs data/glyphs\n"
    "  thermopile train --preset glyphs --data data/glyphs --out runs/glyphs\n"
    "  thermopile inspect runs/glyphs\n\n"
    "Exit codes: 0 done, 1 failed, 2 wrong usage, 75 stopped by a signal, can be resumed.",
)
@click.version_option(__version__, prog_name="thermopile")
@click.option("--debug", is_flag=True, help="Show the full traceback of an error.")
def main(debug: bool) -> None:
    """Contrastive pretraining with a temperature per sample."""
    # The next file that is opened would otherwise take a closed stream's number and its output.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, opened := open(os.devnull, mode))  # noqa: SIM115 (stays open)
            os.set_inheritable(opened.fileno(), True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names may not be valid text
    package = logging.getLogger(__name__.partition(".")[0])
    if not any(isinstance(handler, _WarningsOnStderr) for handler in package.handlers):
        package.addHandler(_WarningsOnStderr(logging.WARNING))


class _WarningsOnStderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # stderr may be a file on the very disk that is full
            click.echo(plain_text(f"Warning: {record.getMessage()}", MAX_ERROR_CHARACTERS), err=True)


if __name__ == "__main__":
    main()
