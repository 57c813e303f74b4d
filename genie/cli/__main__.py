"""`python -m genie.cli`"""

from genie.cli import main

main(prog_name="genie")
