"""What people see in a browser: the overview, runs, why a graph missed; each is JSON too, at the same address.

templates/ says what a page looks like; `views` and `usage_charts` give it values. A page loads nothing but the
stylesheet and runs nothing. May import ../routes/parameters, ../http and ../parts.
"""

from __future__ import annotations
