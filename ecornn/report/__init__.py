"""A tuning log as one HTML page that needs no network: `ecornn report`.

``searches.py`` has the searches of a log and the effects of their knobs, ``layers.py`` the best of every layer and its
floor, ``measured.py`` results of other libraries, ``roles.py`` the picture of a step, ``page.py`` and ``page.html`` the
page.
"""
