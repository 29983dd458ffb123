"""An engine whose own package is missing."""

import a_package_that_nobody_has  # noqa: F401
