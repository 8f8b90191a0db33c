// Just enough MessagePack for the metadata note of a code object.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "bits.hpp"
#include "error.hpp"

namespace petit_emu {

struct Msg {
    std::string text;
    u64 number = 0;
    std::vector<Msg> items;
    std::map<std::string, Msg> fields;

    u64 get(const char* key, u64 fallback = 0) const {
        auto it = fields.find(key);
        return it == fields.end() ? fallback : it->second.number;
    }
    std::string str(const char* key) const {
        auto it = fields.find(key);
        return it == fields.end() ? std::string() : it->second.text;
    }
    const std::vector<Msg>& list(const char* key) const {
        static const std::vector<Msg> empty;
        auto it = fields.find(key);
        return it == fields.end() ? empty : it->second.items;
    }
};

class MsgReader {
  public:
    MsgReader(const u8* p, const u8* end) : p_(p), end_(end) {}

    Msg read() {
        Msg m;
        const u8 t = static_cast<u8>(be(1));
        if (t < 0x80)
            m.number = t;
        else if (t < 0x90)
            map(m, t & 15);
        else if (t < 0xa0)
            array(m, t & 15);
        else if (t < 0xc0)
            string(m, t & 31);
        else if (t >= 0xe0)
            m.number = static_cast<u64>(static_cast<i64>(static_cast<i8>(t)));
        else
            switch (t) {
                case 0xc0:
                case 0xc2:
                    break;
                case 0xc3:
                    m.number = 1;
                    break;
                case 0xcc:
                    m.number = be(1);
                    break;
                case 0xcd:
                    m.number = be(2);
                    break;
                case 0xce:
                    m.number = be(4);
                    break;
                case 0xcf:
                    m.number = be(8);
                    break;
                case 0xd0:
                    m.number = static_cast<u64>(static_cast<i64>(static_cast<i8>(be(1))));
                    break;
                case 0xd1:
                    m.number = static_cast<u64>(static_cast<i64>(static_cast<i16>(be(2))));
                    break;
                case 0xd2:
                    m.number = static_cast<u64>(static_cast<i64>(static_cast<i32>(be(4))));
                    break;
                case 0xd3:
                    m.number = be(8);
                    break;
                case 0xd9:
                    string(m, be(1));
                    break;
                case 0xda:
                    string(m, be(2));
                    break;
                case 0xdb:
                    string(m, be(4));
                    break;
                case 0xdc:
                    array(m, be(2));
                    break;
                case 0xdd:
                    array(m, be(4));
                    break;
                case 0xde:
                    map(m, be(2));
                    break;
                case 0xdf:
                    map(m, be(4));
                    break;
                default:
                    fail("code object metadata: MessagePack type 0x%02x is not handled", t);
            }
        return m;
    }

  private:
    u64 be(int n) {
        if (end_ - p_ < n) fail("code object metadata: truncated MessagePack");
        u64 v = 0;
        for (int i = 0; i < n; ++i) v = (v << 8) | *p_++;
        return v;
    }
    void string(Msg& m, u64 n) {
        if (static_cast<u64>(end_ - p_) < n) fail("code object metadata: truncated string");
        m.text.assign(reinterpret_cast<const char*>(p_), n);
        p_ += n;
    }
    void array(Msg& m, u64 n) {
        for (u64 i = 0; i < n; ++i) m.items.push_back(read());
    }
    void map(Msg& m, u64 n) {
        for (u64 i = 0; i < n; ++i) {
            std::string key = read().text;
            m.fields[key] = read();
        }
    }
    const u8 *p_, *end_;
};

}  // namespace petit_emu
