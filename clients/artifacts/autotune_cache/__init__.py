"""Cache back ends for the autotuners of Triton and Helion, by those libraries' own plug-in points.
In: a library's own key. Out: the winner that another machine of the team measured, checked; or nothing.
"""
