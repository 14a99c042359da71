"""A tuning log as one HTML page that needs no network: `ecornn report`.

``searches.py`` has the searches of a log, ``effects.py`` the effects of their knobs, ``layers.py`` the best of every
layer and its floor, ``measured.py`` results of other libraries, ``pictures.py`` and ``step_picture.py`` pictures,
``page.py`` and ``page.html`` the page.
"""
