#include <tessera/collectives/record_error.h>

#include <tessera/base/error_text.h>

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <nlohmann/json.hpp>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <string>

namespace tessera {

namespace {

// The form of PyTorch's ErrorHandler::record_exception. Without its py_callstack torchrun shows the message.
std::string error_file_of(const std::string& text) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(now).count();
  const nlohmann::json json{{"message", {{"message", text}, {"extraInfo", {{"timestamp", std::to_string(seconds)}}}}}};
  return json.dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace);
}

void record_text(const std::string& text) {
  const char* const path = std::getenv("TORCHELASTIC_ERROR_FILE");
  if (path == nullptr || *path == '\0') return;
  std::ofstream file(path, std::ios::trunc);
  file << error_file_of(text);
  file.close();
  if (!file) {
    TORCH_WARN("record_error: cannot write the file TORCHELASTIC_ERROR_FILE=", path, "; the error was: ", text);
  }
}

} // namespace

void record_error(const std::exception& error) noexcept try {
  record_text(internal::error_text(error));
} catch (...) { // such as a lack of memory: the error itself matters more
}

void record_error(const std::exception_ptr& error) noexcept try { record_text(internal::error_text(error)); } catch (...) {
}

int run_main(const std::function<int()>& run) noexcept try { return run(); } catch (...) {
  const auto error = std::current_exception();
  record_error(error);
  try {
    LOG(ERROR) << internal::error_text(error);
  } catch (...) { // such as a lack of memory: the status says that there was an error
  }
  return 1;
}

} // namespace tessera
