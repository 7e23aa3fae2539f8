#pragma once

#include <Python.h>

namespace tessera::python {

/// Gives Python's lock up, where this thread has it. For all that waits for a thread, or for a lock: other threads take Python's
/// when they let go of a tensor.
class WithoutGil {
 public:
  WithoutGil() : thread_(has_gil() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (thread_ != nullptr) PyEval_RestoreThread(thread_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  // PyGILState_Check says so of every thread once there was a second interpreter, and after Python's end.
  static bool has_gil() {
    if (Py_IsInitialized() == 0) return false;
    const auto* const own = PyGILState_GetThisThreadState();
#if PY_VERSION_HEX >= 0x030D0000
    return own != nullptr && own == PyThreadState_GetUnchecked();
#else
    return own != nullptr && own == _PyThreadState_UncheckedGet();
#endif
  }

  PyThreadState* const thread_;
};

} // namespace tessera::python
