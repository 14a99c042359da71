// Files of weights, one path a line of standard input: their tensors, or why they are refused, each with a zero behind it.
#include <ecornn_safetensors.hpp>
#include <cstdio>
#include <iostream>

int main() {
  for (std::string path; std::getline(std::cin, path);) {
    try {
      ecornn::Safetensors file(path);
      std::string line;
      for (const std::string& name : file.names()) {
        const ecornn::Tensor tensor = file.tensor(name);
        const DLTensor dl = tensor.dl();
        int64_t count = dl.dtype.bits / 8;
        for (const char c : name) line += std::to_string(static_cast<unsigned char>(c)) + " ";
        line += "| " + std::to_string(dl.dtype.code) + " " + std::to_string(dl.dtype.bits) + " |";
        for (int32_t axis = 0; axis < dl.ndim; count *= dl.shape[axis++]) line += " " + std::to_string(dl.shape[axis]);
        line += " |";
        for (int64_t n = 0; n < count; ++n) {
          line += " " + std::to_string(static_cast<const unsigned char*>(dl.data)[n]);
        }
        line += ";";
      }
      std::cout << "0 " << line << '\0';
    } catch (const ecornn::Error& error) {
      std::cout << error.status() << ' ' << error.what() << '\0';
    }
  }
}
