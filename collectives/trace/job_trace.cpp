#include <tessera/collectives/trace/job_trace.h>

#include <tessera/base/error_text.h>

#include <c10/util/Exception.h>

#include <charconv>

namespace tessera::internal {

namespace {

constexpr int kMostCalls = 1'000'000;

int parse_calls(const std::string& text) {
  int calls = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), calls);
  TORCH_CHECK(error == std::errc() && end == text.data() + text.size() && calls >= 0 && calls <= kMostCalls,
              "environment variable TESSERA_TRACE_CALLS=", text, " must be a number from 0 to ", kMostCalls);
  return calls;
}

} // namespace

TraceOptions trace_options(const EnvironmentMap& environment) {
  TraceOptions options;
  if (const auto found = environment.find("TESSERA_TRACE_FOLDER"); found != environment.end()) options.folder = found->second;
  if (const auto found = environment.find("TESSERA_TRACE_CALLS"); found != environment.end() && !found->second.empty())
    options.calls = parse_calls(found->second);
  return options;
}

JobTrace::JobTrace(TraceOwner owner, TraceOptions options)
    : owner_(std::move(owner)), options_(std::move(options)), recorder_(static_cast<size_t>(options_.calls)) {}

void JobTrace::fail(uint64_t number, const std::string& failure) {
  recorder_.fail(number, failure);
  if (!has_failed_.exchange(true)) write_unasked(failure);
}

void JobTrace::refuse(uint64_t number, const std::string& failure) {
  recorder_.refuse(number, failure);
  if (!has_refused_.exchange(true)) write_unasked(failure);
}

void JobTrace::write(const std::string& folder, const std::string& reason) const {
  const auto text = to_json(owner_, recorder_.snapshot(), recorder_.capacity(), reason);
  const std::lock_guard lock(writing_);
  write_trace_file(folder, owner_.rank, text);
}

// An error here must not hide the one that it is written for.
void JobTrace::write_unasked(const std::string& reason) noexcept try {
  if (options_.folder.empty() || fork_depth() != fork_depth_) return;
  try {
    write(options_.folder, reason);
  } catch (const std::exception& error) {
    if (!has_warned_.exchange(true)) {
      TORCH_WARN("TESSERA_TRACE_FOLDER: ", error_text(error));
    }
  }
} catch (...) { // a handler of warnings may throw
}

} // namespace tessera::internal
