/* What `load` of tiered_zero/native/__init__.py compares with its VERSION. Raise both when C sources change. */
enum { TZ_VERSION = 12 };

__attribute__((visibility("default"))) int tz_version(void)
{
    return TZ_VERSION;
}
