"""Why a version cannot be written, found or used. Every message names the file, and the tensor where there is one."""

from core.config.errors import UserError


class WeightsError(UserError):
    """A version on disk cannot be used; whoever has older weights keeps them."""


class NotVisibleError(WeightsError):
    """A manifest or a file did not appear, or stayed short, for as long as a shared file system may take."""


class CorruptError(WeightsError):
    """Bytes on disk are not those that the manifest promises."""


class MismatchError(WeightsError):
    """The tensors are whole, but not those that the reader has: missing, extra, renamed, reshaped, of another dtype."""


class NameTakenError(WeightsError):
    """A version's name was used before; a name never stands for two contents."""


class DiskFullError(WeightsError):
    """There is no room for the version; nothing of it was left behind."""
