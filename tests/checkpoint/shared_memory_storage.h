#pragma once

#include <tessera/checkpoint/storage.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <stdexcept>

namespace tessera::testing {

/// Objects in the shared memory of this host (files in /dev/shm), which all ranks see. An object appears when it is closed, and
/// nothing in it can be changed. Faults can be injected.
class SharedMemoryStorage : public checkpoint::Storage {
 public:
  /// `folder` lies in /dev/shm and belongs to the job.
  explicit SharedMemoryStorage(std::filesystem::path folder) : folder_(std::move(folder)) {}

  /// Throws to fail an operation: "append", "close", "size", "read", "list" or "remove" on an object.
  std::function<void(const std::string& operation, const std::string& object)> fault;
  /// Closes objects whose names contain it without their last byte.
  std::string truncated;
  /// Throws after the object with this name was closed: the answer is lost.
  std::string answer_lost;

  std::unique_ptr<checkpoint::ObjectWriter> create(const std::string& name) override {
    return std::make_unique<Writer>(*this, name);
  }
  std::optional<int64_t> size(const std::string& name) const override {
    check("size", name);
    std::error_code absent;
    const auto size = std::filesystem::file_size(path_of(name), absent);
    return absent ? std::nullopt : std::optional(static_cast<int64_t>(size));
  }
  void read(const std::string& name, int64_t offset, void* data, size_t bytes) const override {
    check("read", name);
    std::ifstream file(path_of(name), std::ios::binary);
    file.seekg(offset);
    file.read(static_cast<char*>(data), static_cast<std::streamsize>(bytes));
    if (!file || file.gcount() != static_cast<std::streamsize>(bytes)) throw std::runtime_error("no such bytes");
  }
  std::vector<std::string> list(const std::string& prefix) const override {
    check("list", prefix);
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      auto name = entry.path().filename().string();
      std::ranges::replace(name, '|', '/');
      if (name.starts_with(prefix) && !name.ends_with(".unfinished")) names.push_back(name);
    }
    return names;
  }
  void remove(const std::string& name) override {
    check("remove", name);
    std::filesystem::remove(path_of(name));
  }

 private:
  class Writer : public checkpoint::ObjectWriter {
   public:
    Writer(const SharedMemoryStorage& storage, std::string name) : storage_(storage), name_(std::move(name)) {}
    void append(const void* data, size_t bytes) override {
      storage_.check("append", name_);
      data_.append(static_cast<const char*>(data), bytes);
    }
    void close() override {
      storage_.check("close", name_);
      if (!storage_.truncated.empty() && name_.find(storage_.truncated) != std::string::npos) data_.pop_back();
      auto unfinished = storage_.path_of(name_);
      unfinished += ".unfinished";
      std::ofstream(unfinished, std::ios::binary).write(data_.data(), static_cast<std::streamsize>(data_.size()));
      std::filesystem::rename(unfinished, storage_.path_of(name_));
      if (name_ == storage_.answer_lost) throw std::runtime_error("the answer was lost");
    }

   private:
    const SharedMemoryStorage& storage_;
    std::string name_, data_;
  };

  std::filesystem::path path_of(std::string name) const {
    std::ranges::replace(name, '/', '|');
    return folder_ / name;
  }
  void check(const std::string& operation, const std::string& name) const {
    if (fault) fault(operation, name);
  }

  std::filesystem::path folder_;
};

} // namespace tessera::testing
