"""The errors that hetkit raises, as one small tree.

Every message says what was given, what is allowed and how to mend it::

    HetkitError
    ├── SettingsError (ValueError)      a setting or an argument is out of its range
    ├── PlanError (ValueError)          no split satisfies what was asked for
    ├── DeviceError (ValueError)        no such device, or it cannot do what was asked
    │   └── DeviceBusyError             another session trains on it
    ├── TaskError (ValueError)          the task cannot be trained as given
    │   ├── PayloadError                part of the task cannot travel to the workers
    │   ├── DataError                   the data is empty or has no length
    │   └── LossError                   the loss is not a scalar, or not finite
    ├── SessionError (RuntimeError)     the call does not fit the session's state
    ├── MissingExtraError (ImportError) an optional dependency is not installed
    ├── LaunchError (RuntimeError)      workers could not be started in time
    │   └── ProtocolError               a message is not one of ours, or of another version
    └── WorkerError (RuntimeError)      something went wrong inside a worker
        ├── WorkerDied                  the process ended without a word
        └── RemoteError                 an exception whose own type cannot leave its worker

A user's own exception is none of these: it arrives as itself, with a note that names the rank,
the step and the worker's traceback.
"""


class HetkitError(Exception):
    """Base of every error that hetkit raises by itself.

    Example:
        >>> import hetkit as hk
        >>> try:
        ...     hk.Settings(amp="fp8")
        ... except hk.HetkitError as error:
        ...     print(type(error).__name__)
        SettingsError
    """


class SettingsError(HetkitError, ValueError):
    """A setting or an argument is out of its range; nothing was changed."""


class PlanError(HetkitError, ValueError):
    """No split of the batch satisfies what was asked for; the message says what would."""


class DeviceError(HetkitError, ValueError):
    """There is no such device, or it cannot do what was asked."""


class DeviceBusyError(DeviceError):
    """Another session trains on the device; the message says which."""


class TaskError(HetkitError, ValueError):
    """The task cannot be trained as given."""


class PayloadError(TaskError):
    """Part of the task cannot be pickled; the message names the variable and its type."""


class DataError(TaskError):
    """The data is empty, or has no length."""


class LossError(TaskError):
    """The loss is not a scalar tensor, or is not finite from the first step."""


class SessionError(HetkitError, RuntimeError):
    """The call does not fit the session's state."""


class MissingExtraError(HetkitError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


class LaunchError(HetkitError, RuntimeError):
    """The nursery or its workers could not be started in time."""


class ProtocolError(LaunchError):
    """A message is not one of ours, or of another version of hetkit."""


class WorkerError(HetkitError, RuntimeError):
    """Something went wrong inside a worker."""


class WorkerDied(WorkerError):
    """A worker process ended without a word (a signal, the out-of-memory killer, a segfault)."""


class RemoteError(WorkerError):
    """Stands for an exception whose own type cannot leave its worker; carries its traceback."""
