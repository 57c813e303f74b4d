"""`python -m genie_ledger.cli`"""

from genie_ledger.cli import main

main(prog_name="genie-ledger")
