// What a module asks of libtvm_ffi, in static libraries, which have none: the error of a function that has failed, until
// the C interface has read it.

#include <tvm/ffi/c_api.h>

#include <cstdio>

namespace {

struct Error {
  TVMFFIObject header;
  TVMFFIErrorCell cell;  // where TVMFFIErrorGetCellPtr() looks for it
  char message[512];
  bool raised;
};

thread_local Error error{};

void Raise(const char* const* parts, int32_t count) {
  size_t size = 0;
  for (int32_t n = 0; n < count && size + 1 < sizeof error.message; ++n) {
    if (!parts[n]) continue;
    const int more = snprintf(error.message + size, sizeof error.message - size, "%s", parts[n]);
    size += more > 0 ? static_cast<size_t>(more) : 0;
  }
  error.cell.message = {error.message, size < sizeof error.message ? size : sizeof error.message - 1};
  error.raised = true;
}

}  // namespace

extern "C" {

void TVMFFIErrorSetRaisedFromCStr(const char*, const char* message) { Raise(&message, 1); }

void TVMFFIErrorSetRaisedFromCStrParts(const char*, const char** parts, int32_t count) { Raise(parts, count); }

void TVMFFIErrorMoveFromRaised(TVMFFIObjectHandle* result) {
  *result = error.raised ? &error : nullptr;
  error.raised = false;
}

int TVMFFIObjectDecRef(TVMFFIObjectHandle) { return 0; }  // the thread's own

// Of the function that gives Python the manifest.
int TVMFFIStringFromByteArray(const TVMFFIByteArray*, TVMFFIAny*) { return -1; }

}  // extern "C"
