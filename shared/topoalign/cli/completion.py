"""`topoalign completion`: the script for the completion of commands and options in a shell."""

import click
from click.shell_completion import get_completion_class

from topoalign.cli import output


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """
    Print the completion script of your shell.

    \b
    Examples:
      source <(topoalign completion bash)           # in ~/.bashrc
      source <(topoalign completion zsh)            # in ~/.zshrc, after compinit
      topoalign completion fish > ~/.config/fish/completions/topoalign.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None, "click knows the three shells"
    output.print_line(kind(ctx.find_root().command, {}, "topoalign", "_TOPOALIGN_COMPLETE").source())
