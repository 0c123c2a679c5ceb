import sys

from jaxserve.start import main

sys.exit(main())
