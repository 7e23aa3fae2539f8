#include <tessera/offload/device_file_memory.h>

#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>

#include <exception>
#include <utility>

#include <tessera/base/aligned_memory.h>
#include <tessera/base/current_stream.h>
#include <tessera/base/tensor_over.h>
#include <tessera/offload/host_memory.h>

namespace tessera::internal {

namespace {

/// Bytes of the host from the start of a page, to whose last page's end the memory goes.
at::Tensor make_buffer(int64_t bytes, bool pinned) {
  if (!pinned) return tensor_over(aligned_memory(bytes), 0, {bytes}, at::kByte);
  auto* const allocator = pinned_allocator();
  const auto size = static_cast<size_t>(whole_pages(bytes) + kPageBytes);
  const c10::Storage storage(c10::Storage::use_byte_size_t(), size, allocator->allocate(size), allocator);
  return from_page(storage, bytes);
}

char* memory_of(const at::Tensor& buffer) { return static_cast<char*>(buffer.mutable_data_ptr()); }

/// Copies from a file to a buffer, and from there to the device.
class FileToDevice final : public PendingCopy {
 public:
  FileToDevice(const FileRegion& region, const at::Tensor& destination, bool pinned)
      : destination_(destination),
        pinned_(pinned),
        buffer_(make_buffer(destination.numel(), pinned)),
        reading_(FileMemory::start(region, Direction::kRead, memory_of(buffer_), buffer_.numel())) {}

  void wait() override {
    reading_->wait();
    const at::NoGradGuard no_grad;
    destination_.copy_(buffer_, /*non_blocking=*/pinned_);
  }

 private:
  at::Tensor destination_;
  bool pinned_;
  at::Tensor buffer_; ///< stays until the reading has ended
  std::unique_ptr<PendingCopy> reading_;
};

/// Stands for what the device could not compute: the error that is handled where this is made.
class FailedCopy final : public PendingCopy {
 public:
  void wait() override { std::rethrow_exception(error_); }

 private:
  std::exception_ptr error_ = std::current_exception();
};

class DeviceFileMemory final : public OffloadMemory {
 public:
  DeviceFileMemory(std::shared_ptr<FileMemory> file, bool pinned) : file_(std::move(file)), pinned_(pinned) {}
  void reserve(int64_t bytes) override { file_->reserve(bytes); }
  c10::DataPtr allocate(int64_t bytes) override { return file_->allocate(bytes); }
  DelayedFailure& delayed_failure() override { return file_->delayed_failure(); }

  std::unique_ptr<PendingCopy> fetch(const at::Tensor& source, const at::Tensor& destination) override {
    const auto* region = file_region(*source.storage().unsafeGetStorageImpl());
    if (region == nullptr) return file_->fetch(source, destination);
    return std::make_unique<FileToDevice>(*region, destination, pinned_);
  }

  std::unique_ptr<PendingCopy> store(const std::vector<at::Tensor>& sources,
                                     const std::vector<at::Tensor>& destinations) override {
    const auto& storage = destinations.at(0).storage();
    const auto bytes = static_cast<int64_t>(storage.nbytes());
    const auto buffer = make_buffer(bytes, pinned_);
    try {
      FileMemory::fill(buffer, sources, destinations, /*non_blocking=*/pinned_);
      if (pinned_) {
        const auto device = sources.at(0).device();
        c10::Event copied(device.type());
        copied.record(current_stream(device));
        copied.synchronize();
      }
    } catch (const std::exception&) {
      return std::make_unique<FailedCopy>();
    }
    FileMemory::start(*file_region(*storage.unsafeGetStorageImpl()), Direction::kWrite, memory_of(buffer), bytes)->wait();
    return nullptr;
  }

 private:
  std::shared_ptr<FileMemory> file_;
  bool pinned_;
};

} // namespace

std::shared_ptr<OffloadMemory> make_device_file_memory(std::shared_ptr<FileMemory> file, bool pinned) {
  if (pinned) pinned_allocator(); // an error where the process has none
  return std::make_shared<DeviceFileMemory>(std::move(file), pinned);
}

} // namespace tessera::internal
