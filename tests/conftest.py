"""What every test runs under."""

import torch

# Tests run several at a time (make test); more threads than cores only wait for each other.
torch.set_num_threads(1)
