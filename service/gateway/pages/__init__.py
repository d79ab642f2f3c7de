"""What people see in a browser: a run, the latest runs, why a graph missed; each is JSON too, at the same address.

The templates beside this module say what a page looks like, `views` gives them their values. A page loads nothing but
the stylesheet and runs nothing. May import ../routes/parameters, ../http and ../parts.
"""

from __future__ import annotations
