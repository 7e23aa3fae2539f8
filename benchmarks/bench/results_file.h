#pragma once

#include <nlohmann/json.hpp>

#include <filesystem>
#include <string>

namespace tessera::benchmarks {

/// The results of a matrix in a file, which is always whole: it is replaced, never written into. One process has it at a time.
class ResultsFile {
 public:
  /// Takes up what is there, or begins a file. Throws c10::Error that names the file where it cannot be written, another process
  /// has it, or it is of another program, version, machine or build.
  explicit ResultsFile(std::filesystem::path file);
  ~ResultsFile();
  ResultsFile(const ResultsFile&) = delete;
  ResultsFile& operator=(const ResultsFile&) = delete;

  /// Null where there is none.
  const nlohmann::ordered_json* find(const nlohmann::ordered_json& settings) const;
  /// The file has it when this returns.
  void add(nlohmann::ordered_json result);

 private:
  void lock();
  void take_up();
  void write() const;

  std::filesystem::path file_;
  int lock_ = -1;
  nlohmann::ordered_json content_;
};

/// Of this process: `program`, `machine` and `versions` of a file.
std::string program_name();
nlohmann::ordered_json describe_machine();
nlohmann::ordered_json describe_versions();

} // namespace tessera::benchmarks
