ROLES = ()


class Images: ...
