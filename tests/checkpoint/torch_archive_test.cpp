// Files of torch.save, sound and broken, made by hand.
#include <gmock/gmock.h>
#include <tessera/checkpoint/open.h>
#include <tessera/checkpoint/pickle_writer.h>
#include <tessera/checkpoint/torch_archive.h>
#include <torch/torch.h>

#include "../support/matchers.h"
#include "../support/temporary_folder.h"
#include "torch_archives.h"

namespace tessera::checkpoint {
namespace {

using internal::PickleWriter;
using testing::error_of;
using ::testing::HasSubstr;
using testing::pickle_of;
using testing::TemporaryFolder;
using testing::write_archive;

// A dict with one entry, "w".
std::string dict_with(const std::function<void(PickleWriter&)>& write) {
  return pickle_of([&](PickleWriter& out) {
    out.empty_dict();
    out.open();
    out.text("w");
    write(out);
    out.close_dict();
  });
}

void write_pair(PickleWriter& out) { internal::write_tensor(out, at::kFloat, {2}, "0", /*for_python=*/true); }

std::string error_in(const std::filesystem::path& file) {
  return error_of([&] { internal::index_of_torch_file(file); });
}

TEST(TorchArchive, ConjugateAndNegativeViewsAreErrors) {
  const TemporaryFolder folder;
  const auto file = folder.path() / "model.pt";
  const auto write = [&](const std::string& bit) {
    write_archive(file, dict_with([&](PickleWriter& out) { testing::write_view(out, bit); }), std::string(16, '\0'));
  };
  write("");
  EXPECT_EQ(internal::index_of_torch_file(file).tensors.at(0).dtype, at::kComplexFloat);
  for (const auto* bit : {"conj", "neg"}) {
    write(bit);
    EXPECT_THAT(error_in(file), HasSubstr("model.pt: \"w\" is stored as a conjugate or negative view"));
  }
}

// The first bytes of what torch.save writes with _use_new_zipfile_serialization=False, by the protocols of pickle.
TEST(TorchArchive, AFileWithoutAZipArchiveIsAnError) {
  const TemporaryFolder folder;
  const std::string magic = "\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.";
  const std::string frame("\x95\x0d\0\0\0\0\0\0\0", 9);
  for (const auto& begin : {"\x80\x02" + magic + "\x80\x02M\xe9\x03.", "\x80\x04" + frame + magic + "\x80\x04M\xe9\x03."}) {
    const auto file = folder.write("model.pt", begin + std::string(100, '\0'));
    EXPECT_THAT(error_of([&] { internal::open_checkpoint(file); }),
                ::testing::AllOf(HasSubstr("model.pt was written without a zip archive"),
                                 HasSubstr("which is not read: load it in Python and save it again")));
  }
}

TEST(TorchArchive, CompressedDataIsAnError) {
  const TemporaryFolder folder;
  const auto file = folder.path() / "model.pt";
  write_archive(file, dict_with(write_pair), std::string(1000, '\0'));
  EXPECT_EQ(error_in(file), "no error");
  write_archive(file, dict_with(write_pair), std::string(1000, '\0'), /*compress=*/true);
  EXPECT_THAT(error_in(file), HasSubstr("model.pt: \"w\": its data is compressed"));
}

TEST(TorchArchive, ParametersAreTensors) {
  const TemporaryFolder folder;
  const auto file = folder.path() / "model.pt";
  for (const auto* function : {"_rebuild_parameter", "_rebuild_parameter_with_state"}) {
    const auto write = [&](PickleWriter& out) {
      out.name("torch._utils", function);
      out.open();
      write_pair(out);
      out.boolean(true); // requires_grad
      out.close_tuple();
      out.call();
    };
    write_archive(file, dict_with(write), std::string(8, '\0'));
    const auto index = internal::index_of_torch_file(file);
    ASSERT_EQ(index.tensors.size(), 1) << function;
    EXPECT_EQ(index.tensors[0].name, "w");
    EXPECT_EQ(index.tensors[0].sizes, std::vector<int64_t>{2});
  }
}

// It may name one list again and again. Its tensors can be read all the same.
TEST(TorchArchive, WhatItHoldsDoesNotOutgrowIt) {
  const TemporaryFolder folder;
  const auto file = folder.path() / "model.pt";
  const auto write = [&](int entries) {
    std::string pickle = "\x80\x02}(", list = "](";
    for (int i = 0; i < 1000; ++i) list += "K\x01";
    for (int i = 0; i < entries; ++i) {
      const auto name = std::to_string(i);
      pickle += "X" + std::string{static_cast<char>(name.size()), 0, 0, 0} + name + (i == 0 ? list + "eq\x01" : "h\x01");
    }
    write_archive(file, pickle + "u.", "");
  };
  write(10);
  EXPECT_EQ(internal::index_of_torch_file(file).values.size(), 10);
  write(1000);
  const auto values = internal::index_of_torch_file(file).values;
  EXPECT_GT(values.size(), 10);
  EXPECT_LT(values.size() * 1000 * sizeof(int64_t), 64 * std::filesystem::file_size(file));
}

TEST(TorchArchive, ATextThatManyHoldDoesNotKeepItFromBeingRead) {
  const TemporaryFolder folder;
  const auto file = folder.path() / "model.pt";
  const auto write = [](PickleWriter& out) {
    write_pair(out);
    for (int i = 0; i < 200; ++i) {
      out.text(std::to_string(i));
      out.text(std::string(10'000, 'x')); // stored once
    }
    out.text("w2");
    write_pair(out);
  };
  write_archive(file, dict_with(write), std::string(8, '\0'));
  const auto index = internal::index_of_torch_file(file);
  EXPECT_EQ(index.tensors.size(), 2);
  EXPECT_LT(index.values.size(), 200);
}

// A name takes its place for each value that it leads to.
TEST(TorchArchive, NamesThatOutgrowItAreAnError) {
  const TemporaryFolder folder;
  const auto file = folder.path() / "model.pt";
  std::string pickle = "\x80\x02}(X\x01" + std::string(3, '\0') + "a}(";
  for (int i = 0; i < 200; ++i) pickle += "X\x03" + std::string(3, '\0') + std::to_string(100 + i) + "K\x01";
  pickle += "uq\x01";
  for (int i = 0; i < 200; ++i) {
    pickle += "X\xc8" + std::string(3, '\0') + std::string(197, 'n') + std::to_string(100 + i) + "h\x01";
  }
  write_archive(file, pickle + "u.", "");
  EXPECT_THAT(error_in(file), HasSubstr("is among values that many others hold"));
}

TEST(TorchArchive, ObjectsOfOtherClassesArePassedOver) {
  const TemporaryFolder folder;
  const auto file = folder.path() / "model.pt";
  const auto write_entries = [](PickleWriter& out) {
    out.open();
    out.text("a");
    out.integer(1);
    out.close_dict();
  };
  const auto write = [&](PickleWriter& out) {
    write_pair(out);
    out.text("deque");
    out.name("collections", "deque");
    out.empty_tuple();
    out.call();
    out.open();
    out.integer(1);
    out.close_list();
    out.text("defaultdict");
    out.name("collections", "defaultdict");
    out.empty_tuple();
    out.call();
    write_entries(out);
    out.text("own");
    out.object("__main__", "OwnDict");
    write_entries(out);
    out.text("step");
    out.integer(7);
  };
  write_archive(file, dict_with(write), std::string(8, '\0'));
  const auto index = internal::index_of_torch_file(file);
  EXPECT_EQ(index.tensors.size(), 1);
  ASSERT_EQ(index.values.size(), 1);
  EXPECT_EQ(index.values[0].first, "step");
}

} // namespace
} // namespace tessera::checkpoint
