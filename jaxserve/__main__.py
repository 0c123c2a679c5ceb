import sys

from jaxserve.commands.cli import main

sys.exit(main())
