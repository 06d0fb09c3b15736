import sys

from scalerl_operator.crd import main

sys.exit(main())
