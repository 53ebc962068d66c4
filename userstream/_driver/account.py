"""The account on which a thread calls the driver: the program's, a future's or housekeeping.

The recorder of `observe` reads the account in each driver call. A query orders later work only if
the program hears the answer: taken for the program's knowledge, a query of userstream's own would
hide races.
"""

from __future__ import annotations

from userstream._driver import core

PROGRAM = core.PROGRAM  # the program waits or asks; the default of every thread
FUTURE = core.FUTURE  # a future is told, and whether the program looks at the future is not seen
HOUSEKEEPING = core.HOUSEKEEPING  # the program does not hear the answer

# Return the address of a C function, `unsigned char *account_of_thread(void)`. It returns where two
# bytes are, and needs no GIL: the account on which the calling thread calls, and its own.
address = core.account_address
# Set the account of the calling thread, for a thread of userstream's own.
set_for_thread = core.set_account
# Call a function on an account: `on(HOUSEKEEPING, function, *args)`. No signal handler runs between
# the return of the function and the restoration of the account.
on = core.on_account
