"""``scalerl fit`` and ``scalerl plan``: a curve in a file, what it says, and what more compute would buy.

Lives here: reading such a file and saying what is wrong with it (``source``), pace and prices
(``pace``), one analysis from which text, JSON and picture all come (``analysis``), the tables a person
reads and the pictures.

Never lives here: statistics. Every number about the curve comes from ``scalerl_curvefit``; what is
done here to one is a unit or a format. What each number means is in ``docs/forecast.md``.

matplotlib is imported when a picture is asked for, and numpy only once one of the two commands runs.
"""
