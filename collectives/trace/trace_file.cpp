#include <tessera/collectives/trace/trace_file.h>

#include <tessera/collectives/calls/signature.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <nlohmann/json.hpp>

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>
#include <cerrno>
#include <cstring>
#include <filesystem>

namespace tessera::internal {

namespace {

using Json = nlohmann::json;

constexpr int kVersion = 1;

Json to_json(const RecordedGroup& group) {
  Json messages = Json::array();
  const auto global = [&](int place) { return group.ranks.at(static_cast<size_t>(place)); };
  for (const auto& [ends, count] : group.messages)
    messages.push_back({{"from", global(ends.first)}, {"to", global(ends.second)}, {"count", count}});
  return {{"name", group.name},
          {"device", group.device},
          {"ranks", group.ranks},
          {"issued", group.issued},
          {"messages", std::move(messages)}};
}

Json to_json(const RecordedCall& call, const FlightRecorder::Snapshot& snapshot) {
  const auto time = [&](Ticks ticks) { return ticks == 0 ? Json() : Json(since_epoch(ticks, snapshot.begin, snapshot.end)); };
  Json json{{"number", call.number},
            {"group", call.group},
            {"what", call.is_connect ? "connect" : tessera::to_string(call.kind)},
            {"state", to_string(call.state)},
            {"thread", call.thread},
            {"issued_ns", time(call.issued)},
            {"awaited_ns", time(call.awaited)},
            {"ended_ns", time(call.ended)}};
  if (call.sequence >= 0) json["sequence"] = call.sequence;
  if (!call.failure.empty()) json["failure"] = call.failure;
  if (call.is_connect) return json;
  json["label"] = call.label;
  if (call.kind != CollectiveKind::kBarrier) {
    json["bytes"] = call.bytes;
    json["dtype"] = c10::toString(call.dtype);
  }
  if (reduces(call.kind)) json["op"] = to_string(call.op);
  if (call.peer >= 0) json["peer"] = snapshot.groups.at(static_cast<size_t>(call.group)).ranks.at(static_cast<size_t>(call.peer));
  return json;
}

[[noreturn]] void throw_cannot_write(const std::string& path, const std::string& why) {
  TORCH_CHECK(false, "cannot write the trace ", path, ": ", why);
}

/// A file beyond the limit would end the process (SIGXFSZ).
void check_limit(const std::string& path, size_t bytes) {
  rlimit limit = {};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && bytes > limit.rlim_cur)
    throw_cannot_write(path, c10::str("it has ", bytes, " bytes, and a file may have ", limit.rlim_cur, " here (ulimit -f)"));
}

void write_all(int file, const std::string& text, const std::string& path) {
  for (size_t done = 0; done < text.size();) {
    const auto count = ::write(file, text.data() + done, text.size() - done);
    if (count < 0 && errno != EINTR) throw_cannot_write(path, std::strerror(errno));
    if (count > 0) done += static_cast<size_t>(count);
  }
}

/// A file beside the one that it becomes.
class TemporaryFile {
 public:
  explicit TemporaryFile(std::string target)
      : target_(std::move(target)), path_(c10::str(target_, ".", getpid())), file_(create(path_)) {
    if (file_ < 0) throw_cannot_write(target_, std::strerror(errno));
  }
  ~TemporaryFile() {
    if (file_ >= 0) close(file_);
    if (!path_.empty()) unlink(path_.c_str());
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  void write(const std::string& text) const { write_all(file_, text, target_); }
  void rename() {
    if (close(std::exchange(file_, -1)) != 0 || ::rename(path_.c_str(), target_.c_str()) != 0)
      throw_cannot_write(target_, std::strerror(errno));
    path_.clear();
  }

 private:
  static int create(const std::string& path) {
    unlink(path.c_str()); // of an earlier process with this id
    return open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  }
  std::string target_, path_;
  int file_;
};

} // namespace

std::string to_json(const TraceOwner& owner, const FlightRecorder::Snapshot& snapshot, size_t capacity,
                    const std::string& reason) {
  Json groups = Json::array(), calls = Json::array();
  for (const auto& group : snapshot.groups) groups.push_back(to_json(group));
  for (const auto& call : snapshot.calls) calls.push_back(to_json(call, snapshot));
  const Json trace{{"format", "tessera trace"},
                   {"version", kVersion},
                   {"job", owner.job},
                   {"rank", owner.rank},
                   {"world_size", owner.world_size},
                   {"host", owner.host},
                   {"pid", getpid()},
                   {"reason", reason},
                   {"written_ns", snapshot.end.since_epoch},
                   {"capacity", capacity},
                   {"issued", snapshot.issued},
                   {"groups", std::move(groups)},
                   {"calls", std::move(calls)}};
  return trace.dump(-1, ' ', false, Json::error_handler_t::replace); // a label may be no UTF-8
}

void write_trace_file(const std::string& folder, int rank, const std::string& text) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  const auto path = (std::filesystem::path(folder) / c10::str("rank-", rank, ".json")).string();
  if (error) throw_cannot_write(path, error.message());
  check_limit(path, text.size());
  TemporaryFile file(path);
  file.write(text);
  file.rename();
}

} // namespace tessera::internal
