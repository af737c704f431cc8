"""attend() joins rotation, bias and mask; the reference defines it, the others are faster."""

from __future__ import annotations

from longspan.attention.dispatch import IMPLS, Choice, attend, choose_impl
from longspan.attention.merge import merge
from longspan.attention.visibility import Visibility

__all__ = ["IMPLS", "Choice", "Visibility", "attend", "choose_impl", "merge"]
