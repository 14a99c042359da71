// Errors on their way to ONNX Runtime, which has statuses in place of exceptions.
#ifndef ECORNN_ORT_STATUS_H_
#define ECORNN_ORT_STATUS_H_

#include <stdexcept>
#include <string>

#include "ecornn.hpp"
#include "ort_api.h"

namespace ort {

struct Refused : std::runtime_error {
  explicit Refused(const std::string& what, Code code_of = kInvalidArgument)
      : std::runtime_error(what), code(code_of) {}
  Code code;
};

// A status that ONNX Runtime returned, on its way back.
struct Raised {
  Status* status;
};

inline void Must(Status* status) {
  if (status) throw Raised{status};
}

inline Code CodeOf(ecornn_status status) {
  return status == ECORNN_FILE ? kNoSuchFile : status <= ECORNN_LAYOUT ? kInvalidArgument : kFail;
}

// Calls a function; what it throws becomes a status, before whose message stands `who`.
template <typename Function>
Status* Guarded(const Api& api, const std::string& who, Function function) noexcept {
  const auto said = [&](Code code, const char* what) { return api.make_status(code, (who + ": " + what).c_str()); };
  try {
    function();
    return nullptr;
  } catch (const Raised& raised) {
    return raised.status;
  } catch (const Refused& refused) {
    return said(refused.code, refused.what());
  } catch (const ecornn::Error& error) {
    return said(CodeOf(error.status()), error.what());
  } catch (const std::exception& error) {
    return said(kFail, error.what());
  }
}

}  // namespace ort

#endif  // ECORNN_ORT_STATUS_H_
