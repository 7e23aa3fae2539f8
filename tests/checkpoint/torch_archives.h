#pragma once

// Zip archives as torch.save writes them, with pickles made by hand.

#include <caffe2/serialize/inline_container.h>
#include <tessera/checkpoint/bytes/pickle_writer.h>

#include <filesystem>
#include <functional>
#include <string>
#include <utility>

namespace tessera::testing {

inline std::string pickle_of(const std::function<void(internal::PickleWriter&)>& write) {
  internal::PickleWriter out;
  write(out);
  return std::move(out).take();
}

/// With `data` as the storage 0.
inline void write_archive(const std::filesystem::path& file, const std::string& pickle, const std::string& data,
                          bool compress = false) {
  caffe2::serialize::PyTorchStreamWriter writer(file.string());
  writer.writeRecord("data.pkl", pickle.data(), pickle.size());
  if (!data.empty()) writer.writeRecord("data/0", data.data(), data.size(), compress);
  writer.writeEndOfFile();
}

/// Two complex numbers in the storage 0, of which Python says that `bit` is set: "conj", "neg", or "" for none.
inline void write_view(internal::PickleWriter& out, const std::string& bit) {
  out.name("torch._utils", "_rebuild_tensor_v2");
  out.open();
  out.open();
  out.text("storage");
  out.name("torch", "ComplexFloatStorage");
  out.text("0");
  out.text("cpu");
  out.integer(2);
  out.close_tuple();
  out.persistent();
  out.integer(0); // the storage's first element
  out.integers({2});
  out.integers({1});
  out.boolean(false); // requires_grad
  out.name("collections", "OrderedDict");
  out.empty_tuple();
  out.call(); // hooks
  out.empty_dict();
  if (!bit.empty()) {
    out.open();
    out.text(bit);
    out.boolean(true);
    out.close_dict();
  }
  out.close_tuple();
  out.call();
}

} // namespace tessera::testing
