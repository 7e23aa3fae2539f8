#include "results_file.h"

#include <c10/util/Exception.h>
#include <torch/version.h>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <system_error>
#include <utility>

namespace tessera::benchmarks {
namespace {

using nlohmann::ordered_json;

constexpr int kVersion = 1;

/// The first line of a file of /proc that begins with `key`, without it.
std::string line_of(const char* file, const std::string& key) {
  std::ifstream stream(file);
  for (std::string line; std::getline(stream, line);) {
    if (!line.starts_with(key)) continue;
    const auto begin = line.find_first_not_of(" \t:", key.size());
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "unknown";
}

std::string in_error(const std::filesystem::path& file, const char* what) {
  return file.string() + ": cannot " + what + ": " + std::strerror(errno);
}

/// All or nothing, also where the machine stops.
void write_durably(const std::filesystem::path& file, const std::string& text) {
  const int descriptor = open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  TORCH_CHECK(descriptor >= 0, in_error(file, "be written"));
  size_t done = 0;
  while (done < text.size()) {
    const auto count = ::write(descriptor, text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    done += static_cast<size_t>(count);
  }
  const bool is_whole = done == text.size() && fsync(descriptor) == 0;
  const auto error = in_error(file, "be written");
  close(descriptor);
  TORCH_CHECK(is_whole, error);
}

} // namespace

std::string program_name() {
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/exe", error).filename().string();
}

ordered_json describe_machine() {
  utsname system{};
  uname(&system);
  const int64_t bytes = sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
  return {{"cpu", line_of("/proc/cpuinfo", "model name")},
          {"cores", sysconf(_SC_NPROCESSORS_ONLN)},
          {"memory_bytes", bytes},
          {"system", std::string(system.sysname) + " " + system.release}};
}

ordered_json describe_versions() {
  return {{"tessera", TESSERA_VERSION}, {"build", TESSERA_BUILD_TYPE}, {"libtorch", TORCH_VERSION}, {"compiler", __VERSION__}};
}

ResultsFile::ResultsFile(std::filesystem::path file) : file_(std::move(file)) {
  TORCH_CHECK(!file_.empty(), "the results have no file");
  std::error_code error;
  if (file_.has_parent_path()) std::filesystem::create_directories(file_.parent_path(), error);
  lock();
  content_ = {{"format", "tessera-bench"},       {"version", kVersion},
              {"program", program_name()},       {"machine", describe_machine()},
              {"versions", describe_versions()}, {"results", ordered_json::array()}};
  if (std::filesystem::exists(file_)) take_up();
  write(); // an output that cannot be written is known before anything is measured
}

ResultsFile::~ResultsFile() {
  if (lock_ >= 0) close(lock_);
}

void ResultsFile::lock() {
  const auto name = std::filesystem::path(file_.string() + ".lock");
  lock_ = open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  TORCH_CHECK(lock_ >= 0, in_error(name, "be made"));
  if (flock(lock_, LOCK_EX | LOCK_NB) == 0) return;
  close(std::exchange(lock_, -1));
  TORCH_CHECK(false, file_.string(), ": another program adds to it");
}

void ResultsFile::take_up() {
  std::ifstream stream(file_);
  const auto before = ordered_json::parse(stream, nullptr, /*allow_exceptions=*/false);
  const auto is_result = [](const ordered_json& each) {
    return each.is_object() && each.contains("settings") && each["settings"].is_object() && each.contains("status") &&
           each["status"].is_string() && (each["status"] != "ok" || each.contains("measured"));
  };
  const bool is_ours = before.is_object() && before.contains("format") && before["format"] == "tessera-bench" &&
                       before.contains("results") && before["results"].is_array() &&
                       std::all_of(before["results"].begin(), before["results"].end(), is_result);
  TORCH_CHECK(is_ours, file_.string(), ": no results of tessera-bench; choose another file");
  for (const char* key : {"version", "program", "machine", "versions"}) {
    TORCH_CHECK(before.contains(key) && before[key] == content_[key], file_.string(), ": its ", key, " is ",
                before.value(key, ordered_json()).dump(), ", but here it is ", content_[key].dump(), "; choose another file");
  }
  content_["results"] = before["results"];
}

const ordered_json* ResultsFile::find(const ordered_json& settings) const {
  const auto& results = content_["results"];
  const nlohmann::json wanted(settings); // in any order
  const auto found =
      std::find_if(results.begin(), results.end(), [&](const auto& each) { return nlohmann::json(each["settings"]) == wanted; });
  return found == results.end() ? nullptr : &*found;
}

void ResultsFile::add(ordered_json result) {
  content_["results"].push_back(std::move(result));
  write();
}

void ResultsFile::write() const {
  const auto partial = std::filesystem::path(file_.string() + ".partial");
  write_durably(partial, content_.dump(1) + "\n");
  TORCH_CHECK(std::rename(partial.c_str(), file_.c_str()) == 0, in_error(file_, "be replaced"));
}

} // namespace tessera::benchmarks
